pub(crate) const WAYS: u64 = 4; use crate::support::ranks::Role; pub(crate) fn killed(_: &Role){} pub(crate) fn held(_: &Role){} pub(crate) fn failing(_: &Role){} pub(crate) fn late(_: &Role){}
