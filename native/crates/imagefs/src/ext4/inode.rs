//! One inode: 256 bytes, of which 32 are the extra fields and the last 96 may hold extended attributes.

use super::bytes::{high, le16, le32, low, put16, put32};

/// Bytes of an inode.
pub const INODE_BYTES: usize = 256;
/// Where attributes inside the inode begin: after the classic 128 bytes and the 32 extra ones.
pub const ATTRIBUTES_AT: usize = 160;
const EXTRA_BYTES: u16 = 32;
const FLAG_INDEX: u32 = 0x1000;
const FLAG_EXTENTS: u32 = 0x8_0000;
const BLOCK_AREA: usize = 0x28;
const BLOCK_AREA_BYTES: usize = 60;
/// A directory with more sub-directories than this has a link count of 1 (`dir_nlink`).
const LINKS_MAX: usize = 65000;

/// What an entry of the tree is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Kind {
    /// Regular file.
    File,
    /// Directory.
    Directory,
    /// Symbolic link and its target.
    Symlink(Vec<u8>),
    /// Character device, major and minor.
    Character(u32, u32),
    /// Block device, major and minor.
    Block(u32, u32),
    /// Named pipe.
    Fifo,
}

impl Kind {
    fn mode_bits(&self) -> u16 {
        match self {
            Kind::File => 0o100_000,
            Kind::Directory => 0o040_000,
            Kind::Symlink(_) => 0o120_000,
            Kind::Character(..) => 0o020_000,
            Kind::Block(..) => 0o060_000,
            Kind::Fifo => 0o010_000,
        }
    }
}

/// Who may do what with an entry, and when it was changed.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Meta {
    /// Permission bits with setuid, setgid and sticky.
    pub mode: u16,
    /// Owner.
    pub uid: u32,
    /// Group.
    pub gid: u32,
    /// Seconds since the epoch.
    pub mtime_s: i64,
    /// And nanoseconds.
    pub mtime_ns: u32,
    /// Extended attributes by full name.
    pub xattrs: Vec<(Vec<u8>, Vec<u8>)>,
}

/// The bytes of an inode.
#[derive(Clone)]
pub struct Inode([u8; INODE_BYTES]);

impl Inode {
    /// An unused one.
    pub fn empty() -> Inode {
        Inode([0; INODE_BYTES])
    }

    /// From the inode table.
    pub fn from_bytes(bytes: &[u8]) -> Inode {
        let mut inode = Inode::empty();
        inode.0.copy_from_slice(bytes);
        inode
    }

    /// A new one without content. All its times are that of its last change.
    pub fn new(kind: &Kind, meta: &Meta) -> Inode {
        let mut inode = Inode::empty();
        put16(&mut inode.0, 0x80, EXTRA_BYTES);
        inode.set_meta(kind, meta);
        inode.set_links(1);
        match kind {
            Kind::Character(major, minor) | Kind::Block(major, minor) => {
                inode.set_device(*major, *minor)
            }
            _ => {}
        }
        inode
    }

    /// Everything of `Meta` but the attributes.
    pub fn set_meta(&mut self, kind: &Kind, meta: &Meta) {
        let bytes = &mut self.0;
        put16(bytes, 0x0, kind.mode_bits() | meta.mode & 0o7777);
        put16(bytes, 0x2, (meta.uid & 0xffff) as u16);
        put16(bytes, 0x78, (meta.uid >> 16) as u16);
        put16(bytes, 0x18, (meta.gid & 0xffff) as u16);
        put16(bytes, 0x7a, (meta.gid >> 16) as u16);
        let (seconds, extra) = encode_time(meta.mtime_s, meta.mtime_ns);
        for (at, extra_at) in [(0x8, 0x8c), (0xc, 0x84), (0x10, 0x88), (0x90, 0x94)] {
            put32(bytes, at, seconds);
            put32(bytes, extra_at, extra);
        }
    }

    fn set_device(&mut self, major: u32, minor: u32) {
        if major < 256 && minor < 256 {
            put32(&mut self.0, BLOCK_AREA, major << 8 | minor);
        } else {
            let code = minor & 0xff | major << 8 | (minor & !0xff) << 12;
            put32(&mut self.0, BLOCK_AREA + 4, code);
        }
    }

    /// The bytes as they are on disk.
    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    /// The part that may hold extended attributes.
    pub fn attribute_area(&mut self) -> &mut [u8] {
        &mut self.0[ATTRIBUTES_AT..]
    }

    /// Whether the extra fields have the size this module gives them.
    pub fn has_usual_extra(&self) -> bool {
        le16(&self.0, 0x80) == EXTRA_BYTES
    }

    fn file_type(&self) -> u16 {
        le16(&self.0, 0) & 0o170_000
    }

    /// Whether it is a directory.
    pub fn is_directory(&self) -> bool {
        self.file_type() == 0o040_000
    }

    /// Whether it is a symbolic link.
    pub fn is_symlink(&self) -> bool {
        self.file_type() == 0o120_000
    }

    /// The type as directory entries state it.
    pub fn entry_type(&self) -> u8 {
        match self.file_type() {
            0o100_000 => 1,
            0o040_000 => 2,
            0o020_000 => 3,
            0o060_000 => 4,
            0o010_000 => 5,
            0o140_000 => 6,
            0o120_000 => 7,
            _ => 0,
        }
    }

    /// Whether its block area is the root of an extent tree.
    pub fn has_extents(&self) -> bool {
        le32(&self.0, 0x20) & FLAG_EXTENTS != 0
    }

    /// The 60 bytes that hold extents, a short link target or a device.
    pub fn block_area(&self) -> &[u8] {
        &self.0[BLOCK_AREA..BLOCK_AREA + BLOCK_AREA_BYTES]
    }

    /// Sets the root of an extent tree, the size, and how many blocks content and tree have.
    pub fn set_content(
        &mut self,
        root: &[u8; BLOCK_AREA_BYTES],
        size_bytes: u64,
        blocks: u64,
        is_indexed: bool,
    ) {
        self.0[BLOCK_AREA..BLOCK_AREA + BLOCK_AREA_BYTES].copy_from_slice(root);
        let flags = le32(&self.0, 0x20) & !FLAG_INDEX | FLAG_EXTENTS;
        put32(
            &mut self.0,
            0x20,
            if is_indexed {
                flags | FLAG_INDEX
            } else {
                flags
            },
        );
        self.set_size(size_bytes);
        self.set_blocks(blocks + u64::from(self.attribute_block() != 0));
    }

    /// Sets a link target short enough for the inode itself.
    pub fn set_short_target(&mut self, target: &[u8]) {
        self.0[BLOCK_AREA..BLOCK_AREA + target.len()].copy_from_slice(target);
        self.set_size(target.len() as u64);
    }

    /// Size of the content.
    pub fn size_bytes(&self) -> u64 {
        u64::from(le32(&self.0, 0x4)) | u64::from(le32(&self.0, 0x6c)) << 32
    }

    fn set_size(&mut self, size_bytes: u64) {
        put32(&mut self.0, 0x4, low(size_bytes));
        put32(&mut self.0, 0x6c, high(size_bytes));
    }

    /// Blocks in use, counted in file system blocks.
    fn blocks(&self) -> u64 {
        (u64::from(le32(&self.0, 0x1c)) | u64::from(le16(&self.0, 0x74)) << 32) / 8
    }

    fn set_blocks(&mut self, blocks: u64) {
        put32(&mut self.0, 0x1c, low(blocks * 8));
        put16(&mut self.0, 0x74, (high(blocks * 8) & 0xffff) as u16);
    }

    /// Names that stand for it.
    pub fn links(&self) -> u16 {
        le16(&self.0, 0x1a)
    }

    /// Sets how many names stand for it; a directory beyond the limit has 1.
    pub fn set_links(&mut self, links: usize) {
        let links = if links >= LINKS_MAX { 1 } else { links as u16 };
        put16(&mut self.0, 0x1a, links);
    }

    /// Whether another hard link is possible.
    pub fn can_be_linked(&self) -> bool {
        usize::from(self.links()) < LINKS_MAX
    }

    /// The block with its extended attributes, or 0.
    pub fn attribute_block(&self) -> u64 {
        u64::from(le32(&self.0, 0x68)) | u64::from(le16(&self.0, 0x76)) << 32
    }

    /// Sets the block with its extended attributes, which counts as one of its blocks.
    pub fn set_attribute_block(&mut self, block: u64) {
        let had = u64::from(self.attribute_block() != 0);
        let has = u64::from(block != 0);
        put32(&mut self.0, 0x68, low(block));
        put16(&mut self.0, 0x76, (high(block) & 0xffff) as u16);
        self.set_blocks(self.blocks().saturating_sub(had) + has);
    }
}

/// Seconds wrap to 32 bits; two more bits and the nanoseconds are in the extra field. Times beyond that are cut off.
fn encode_time(seconds: i64, nanoseconds: u32) -> (u32, u32) {
    let seconds = seconds.clamp(i64::from(i32::MIN), i64::from(i32::MIN) + (1 << 34) - 1);
    let wrapped = seconds as i32;
    let epoch = ((seconds - i64::from(wrapped)) >> 32) as u32 & 3;
    (wrapped as u32, nanoseconds << 2 | epoch)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_before_1970_and_after_2038_are_kept() {
        assert_eq!(encode_time(-1, 5), (u32::MAX, 20));
        assert_eq!(encode_time(1 << 31, 0), (1 << 31, 1));
        assert_eq!(encode_time(i64::MAX, 0), (i32::MAX as u32, 3));
        assert_eq!(encode_time(i64::MIN, 0), (1 << 31, 0));
    }

    #[test]
    fn large_device_numbers_have_their_own_place() {
        let small = Inode::new(&Kind::Character(1, 3), &Meta::default());
        assert_eq!(le32(small.block_area(), 0), 0x103);
        let large = Inode::new(&Kind::Block(259, 300), &Meta::default());
        assert_eq!(le32(large.block_area(), 0), 0);
        assert_eq!(
            le32(large.block_area(), 4),
            (300 & 0xff) | 259 << 8 | 0x100 << 12
        );
    }
}
