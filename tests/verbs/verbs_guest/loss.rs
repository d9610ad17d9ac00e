//! A node is lost, as if its power were cut: operations with it end. This is the last test of a
//! run, since no second node is left for another.

use super::course::{Course, PARTED, Parting, RUNNING};
use super::network::LIMIT;
use super::nodes::OnCourse;
use super::{is_in_guests, node, told};
use crate::support::Watchdog;
use crate::support::guests::Port;

#[test]
fn a_node_that_is_killed_ends_the_operations_of_the_other() {
    if !is_in_guests("a node that is killed", "2") {
        return;
    }
    let _watchdog = Watchdog::patient("a node that is killed", LIMIT);
    let parting = Parting::EachOther;
    let mut rank = OnCourse::start(Course { parting, ..Course::of(4000) }, Port(31005));
    rank.hears(RUNNING);
    if node() == 0 {
        std::fs::write(told("HOST").unwrap(), "kill 1\n").unwrap();
    }
    rank.hears(PARTED);
    rank.end();
}
