//! The problem: counting the nodes of a tree whose shape is known only after walking it.
//!
//! It is the binomial tree of UTS, the Unbalanced Tree Search benchmark (Olivier and others,
//! 2006). The root has many children; every other node has either several or none, by its hash.
//! Sizes of neighbouring subtrees can differ a thousandfold, so no static division of the work
//! helps. UTS hashes with SHA-1; this example applies the finalizer of SplitMix64 several times,
//! so that each node costs some time.

const ROOT_CHILDREN: u64 = 4_000;
const CHILDREN: u64 = 8;
/// Share of the nodes that have children. CHILDREN times this is just under 1: the tree is finite,
/// and deep.
const FERTILE: f64 = 0.1245;
const HASHES: u32 = 20;

/// Node, from which its children can be computed: eight bytes to send.
#[derive(Clone, Copy)]
pub(crate) struct Node(pub u64);

pub(crate) const ROOT: Node = Node(0);

impl Node {
    pub(crate) fn children(self) -> impl Iterator<Item = Self> {
        let fertile = (self.0 as f64) < FERTILE * u64::MAX as f64;
        let count = match self.0 {
            0 => ROOT_CHILDREN,
            _ if fertile => CHILDREN,
            _ => 0,
        };
        (1..=count).map(move |which| Self((0..HASHES).fold(self.0 ^ which, |value, _| hash(value))))
    }
}

/// Counts the whole tree with one thread, to check the ranks' result.
pub(crate) fn count_alone() -> u64 {
    let (mut stack, mut nodes) = (vec![ROOT], 0);
    while let Some(node) = stack.pop() {
        nodes += 1;
        stack.extend(node.children());
    }
    nodes
}

/// Hashes a number by SplitMix64's step and finalizer (Steele, Lea and Flood, 2014).
pub(crate) fn hash(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
