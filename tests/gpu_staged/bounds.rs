use crate::support::ranks::Role; pub(crate) fn poor(_: &Role){} pub(crate) fn bounded(_: &Role){} pub(crate) fn crowd(_: &Role){}
