//! The watched folders and how they hang together, by the numbers the kernel gave them.
//!
//! Invariants: every folder but the top and those on the move is the child of its parent under its
//! name; following parents always ends at the top. A moved folder takes all below it along for free,
//! because only its own place is stored.

use std::collections::HashMap;
use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use super::queue::WatchId;

/// One watched folder.
struct Node {
    parent: WatchId,
    name: OsString,
    device: u64,
    children: HashMap<OsString, WatchId>,
}

/// All watched folders of one watcher.
pub struct Tree {
    top: WatchId,
    nodes: HashMap<WatchId, Node>,
    /// Folders whose move was announced and whose new place was not, by the cookie of the move.
    moving: HashMap<u32, WatchId>,
}

impl Tree {
    /// A tree of one folder on the given device.
    pub fn new(top: WatchId, device: u64) -> Self {
        let node = Node {
            parent: top,
            name: OsString::new(),
            device,
            children: HashMap::new(),
        };
        Self {
            top,
            nodes: HashMap::from([(top, node)]),
            moving: HashMap::new(),
        }
    }

    /// The folder asked for.
    pub fn top(&self) -> WatchId {
        self.top
    }

    /// Whether the folder is watched.
    pub fn contains(&self, watch: WatchId) -> bool {
        self.nodes.contains_key(&watch)
    }

    /// Device the folder is on.
    pub fn device(&self, watch: WatchId) -> Option<u64> {
        self.nodes.get(&watch).map(|node| node.device)
    }

    /// Watched folder of that name in another.
    pub fn child(&self, parent: WatchId, name: &OsStr) -> Option<WatchId> {
        self.nodes.get(&parent)?.children.get(name).copied()
    }

    /// Path of a folder below the top, empty for the top. None when it is not watched, or what it is in
    /// is not.
    pub fn relative(&self, watch: WatchId) -> Option<PathBuf> {
        let mut names = Vec::new();
        let mut at = watch;
        while at != self.top {
            let node = self.nodes.get(&at)?;
            names.push(&node.name);
            at = node.parent;
        }
        Some(names.into_iter().rev().collect())
    }

    /// Adds a folder.
    pub fn insert(&mut self, parent: WatchId, name: &OsStr, watch: WatchId, device: u64) {
        let node = Node {
            parent,
            name: name.to_owned(),
            device,
            children: HashMap::new(),
        };
        self.nodes.insert(watch, node);
        if let Some(above) = self.nodes.get_mut(&parent) {
            above.children.insert(name.to_owned(), watch);
        }
    }

    /// The folder leaves its place; where it goes is told by a record with the same cookie, if it stays
    /// in the tree at all.
    pub fn start_move(&mut self, parent: WatchId, name: &OsStr, cookie: u32) {
        let above = self.nodes.get_mut(&parent);
        if let Some(watch) = above.and_then(|above| above.children.remove(name)) {
            self.moving.insert(cookie, watch);
        }
    }

    /// The folder whose move has this cookie.
    pub fn finish_move(&mut self, cookie: u32) -> Option<WatchId> {
        self.moving.remove(&cookie)
    }

    /// Whether the new place of the folder is still to come; forgets that it is.
    pub fn abandon_move(&mut self, watch: WatchId) -> bool {
        let before = self.moving.len();
        self.moving.retain(|_, moving| *moving != watch);
        self.moving.len() < before
    }

    /// Gives a watched folder a new place. False when that would be inside itself.
    pub fn place(&mut self, watch: WatchId, parent: WatchId, name: &OsStr) -> bool {
        let mut at = parent;
        while at != self.top {
            match self.nodes.get(&at) {
                Some(node) if at != watch => at = node.parent,
                _ => return false,
            }
        }
        let Some(node) = self.nodes.get_mut(&watch) else {
            return false;
        };
        let old_parent = std::mem::replace(&mut node.parent, parent);
        let old_name = std::mem::replace(&mut node.name, name.to_owned());
        if let Some(above) = self.nodes.get_mut(&old_parent) {
            if above.children.get(&old_name) == Some(&watch) {
                above.children.remove(&old_name);
            }
        }
        if let Some(above) = self.nodes.get_mut(&parent) {
            above.children.insert(name.to_owned(), watch);
        }
        true
    }

    /// Forgets a folder and all below it, and returns their numbers.
    pub fn remove(&mut self, watch: WatchId) -> Vec<WatchId> {
        if let Some((parent, name)) = self
            .nodes
            .get(&watch)
            .map(|node| (node.parent, node.name.clone()))
        {
            if self.child(parent, &name) == Some(watch) {
                if let Some(above) = self.nodes.get_mut(&parent) {
                    above.children.remove(&name);
                }
            }
        }
        let mut removed = Vec::new();
        let mut left = vec![watch];
        while let Some(watch) = left.pop() {
            if let Some(node) = self.nodes.remove(&watch) {
                removed.push(watch);
                left.extend(node.children.into_values());
            }
        }
        removed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(tree: &Tree, watch: WatchId) -> Option<String> {
        Some(tree.relative(watch)?.to_string_lossy().into_owned())
    }

    /// 1 is the top, 2 = a, 3 = a/b, 4 = c.
    fn sample() -> Tree {
        let mut tree = Tree::new(1, 0);
        tree.insert(1, OsStr::new("a"), 2, 0);
        tree.insert(2, OsStr::new("b"), 3, 0);
        tree.insert(1, OsStr::new("c"), 4, 0);
        tree
    }

    #[test]
    fn a_move_takes_everything_below_along() {
        let mut tree = sample();
        tree.start_move(1, OsStr::new("a"), 9);
        assert_eq!(path(&tree, 3).unwrap(), "a/b");
        assert_eq!(tree.child(1, OsStr::new("a")), None);
        assert_eq!(tree.finish_move(8), None);
        let moved = tree.finish_move(9).unwrap();
        assert!(tree.place(moved, 4, OsStr::new("x")));
        assert!(!tree.abandon_move(moved));
        assert_eq!(path(&tree, 3).unwrap(), "c/x/b");
        assert_eq!(tree.child(4, OsStr::new("x")), Some(2));
    }

    #[test]
    fn a_move_out_is_known_by_its_missing_end() {
        let mut tree = sample();
        tree.start_move(1, OsStr::new("a"), 9);
        assert!(tree.abandon_move(2));
        assert_eq!(tree.remove(2), [2, 3]);
        assert_eq!((tree.nodes.len(), path(&tree, 3)), (2, None));
        assert!(!tree.abandon_move(2));
    }

    #[test]
    fn nothing_is_placed_inside_itself() {
        let mut tree = sample();
        assert!(!tree.place(2, 3, OsStr::new("a")));
        assert!(!tree.place(2, 2, OsStr::new("a")));
        assert!(!tree.place(2, 77, OsStr::new("a")));
        assert!(!tree.place(77, 1, OsStr::new("a")));
        assert_eq!(path(&tree, 3).unwrap(), "a/b");
        assert_eq!(tree.remove(4), [4]);
        assert_eq!(tree.child(1, OsStr::new("c")), None);
    }
}
