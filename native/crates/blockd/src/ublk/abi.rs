//! The kernel's ublk interface (include/uapi/linux/ublk_cmd.h): numbers and byte layouts.
//!
//! Everything is little-endian as the machine is; layouts are written field by field, so
//! that no padding is left to the compiler. Needs the kernel's encoded commands (6.4) and
//! `GET_FEATURES` (6.5).

/// Sectors of the interface, whatever the device's block size.
pub const SECTOR_BYTES: u64 = 512;

const fn control(direction: u32, number: u32) -> u32 {
    direction << 30 | 32 << 16 | (b'u' as u32) << 8 | number
}

const fn io(number: u32) -> u32 {
    3 << 30 | 16 << 16 | (b'u' as u32) << 8 | number
}

/// Commands to `/dev/ublk-control`.
pub mod command {
    use super::control;

    /// Fills in a [`super::DeviceInfo`].
    pub const GET_DEV_INFO: u32 = control(2, 0x02);
    /// Makes a device from a [`super::DeviceInfo`].
    pub const ADD_DEV: u32 = control(3, 0x04);
    /// Removes a stopped device; waits until nobody has it.
    pub const DEL_DEV: u32 = control(3, 0x05);
    /// Removes a stopped device as soon as nobody has it (Linux 6.7).
    pub const DEL_DEV_ASYNC: u32 = control(2, 0x14);
    /// Makes the block device; waits until every request slot was fetched.
    pub const START_DEV: u32 = control(3, 0x06);
    /// Removes the block device and ends its I/O.
    pub const STOP_DEV: u32 = control(3, 0x07);
    /// States size and limits.
    pub const SET_PARAMS: u32 = control(3, 0x08);
    /// Takes a device whose server died.
    pub const START_USER_RECOVERY: u32 = control(3, 0x10);
    /// Lets its I/O go on.
    pub const END_USER_RECOVERY: u32 = control(3, 0x11);
    /// Fills in 8 bytes of feature flags.
    pub const GET_FEATURES: u32 = control(2, 0x13);
}

/// Commands to `/dev/ublkcN`.
pub mod slot_command {
    use super::io;

    /// Gives a slot to the kernel for a first request.
    pub const FETCH: u32 = io(0x20);
    /// Answers a slot's request and gives it back.
    pub const COMMIT_AND_FETCH: u32 = io(0x21);
}

/// Feature and device flags.
pub mod flag {
    /// Requests reach the server in the work that its ring defers.
    pub const COMPLETE_IN_TASK: u64 = 1 << 1;
    /// The device waits for a new server when its server dies.
    pub const USER_RECOVERY: u64 = 1 << 3;
    /// And sends the requests again that the old one had not answered.
    pub const USER_RECOVERY_REISSUE: u64 = 1 << 4;
    /// Commands are encoded as ioctls.
    pub const CMD_IOCTL_ENCODE: u64 = 1 << 6;
    /// All that is needed here.
    pub const NEEDED: u64 =
        COMPLETE_IN_TASK | USER_RECOVERY | USER_RECOVERY_REISSUE | CMD_IOCTL_ENCODE;
}

/// States of a device.
pub mod state {
    /// Not started, or stopped.
    pub const DEAD: u16 = 0;
    /// Its server died; it waits for a new one.
    pub const QUIESCED: u16 = 2;
}

/// Requests.
pub mod operation {
    /// Fill the slot's buffer.
    pub const READ: u8 = 0;
    /// Take the slot's buffer.
    pub const WRITE: u8 = 1;
    /// Make everything durable.
    pub const FLUSH: u8 = 2;
    /// The content is not needed any more.
    pub const DISCARD: u8 = 3;
    /// Read as zero from now on.
    pub const WRITE_ZEROES: u8 = 5;
    /// Bit of the flags: durable before the answer.
    pub const FUA: u32 = 1 << 13;
}

/// Length of [`DeviceInfo`].
pub const INFO_BYTES: usize = 64;

/// `ublksrv_ctrl_dev_info`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Request queues.
    pub queues: u16,
    /// Slots of each.
    pub depth: u16,
    /// One of [`state`].
    pub state: u16,
    /// Largest request.
    pub max_io_bytes: u32,
    /// Its number; `u32::MAX` asks the kernel for a free one.
    pub number: u32,
    /// The server's process.
    pub server_pid: i32,
    /// One of [`flag`], or several.
    pub flags: u64,
    /// The server's own; the kernel only keeps it.
    pub owner_tag: u64,
}

impl DeviceInfo {
    /// As the kernel has it.
    pub fn encode(&self) -> [u8; INFO_BYTES] {
        let mut bytes = [0; INFO_BYTES];
        bytes[0..2].copy_from_slice(&self.queues.to_le_bytes());
        bytes[2..4].copy_from_slice(&self.depth.to_le_bytes());
        bytes[4..6].copy_from_slice(&self.state.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.max_io_bytes.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.number.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.server_pid.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.flags.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.owner_tag.to_le_bytes());
        bytes
    }

    /// From the kernel.
    pub fn decode(bytes: &[u8; INFO_BYTES]) -> DeviceInfo {
        DeviceInfo {
            queues: u16::from_le_bytes([bytes[0], bytes[1]]),
            depth: u16::from_le_bytes([bytes[2], bytes[3]]),
            state: u16::from_le_bytes([bytes[4], bytes[5]]),
            max_io_bytes: word32(bytes, 8),
            number: word32(bytes, 12),
            server_pid: word32(bytes, 16) as i32,
            flags: word64(bytes, 24),
            owner_tag: word64(bytes, 32),
        }
    }
}

/// Length of [`Parameters`].
pub const PARAMETERS_BYTES: usize = 64;
const TYPE_BASIC: u32 = 1;
const TYPE_DISCARD: u32 = 2;
const ATTRIBUTE_READ_ONLY: u32 = 1;
const ATTRIBUTE_VOLATILE_CACHE: u32 = 4;
const ATTRIBUTE_FUA: u32 = 8;
const LOGICAL_BLOCK_SHIFT: u8 = 9;
const PHYSICAL_BLOCK_SHIFT: u8 = 12;

/// What of `ublk_params` is used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Parameters {
    /// Size of the disk.
    pub size_bytes: u64,
    /// Takes writes, has a cache that can be flushed, and discards.
    pub is_writable: bool,
    /// Largest read or write.
    pub max_io_bytes: u32,
    /// Largest discard.
    pub max_discard_bytes: u32,
}

impl Parameters {
    /// As the kernel has it.
    pub fn encode(&self) -> [u8; PARAMETERS_BYTES] {
        let mut bytes = [0; PARAMETERS_BYTES];
        let (types, attributes) = if self.is_writable {
            let attributes = ATTRIBUTE_VOLATILE_CACHE | ATTRIBUTE_FUA;
            (TYPE_BASIC | TYPE_DISCARD, attributes)
        } else {
            (TYPE_BASIC, ATTRIBUTE_READ_ONLY)
        };
        let sectors = |size_bytes: u32| (size_bytes / SECTOR_BYTES as u32).to_le_bytes();
        bytes[0..4].copy_from_slice(&(PARAMETERS_BYTES as u32).to_le_bytes());
        bytes[4..8].copy_from_slice(&types.to_le_bytes());
        bytes[8..12].copy_from_slice(&attributes.to_le_bytes());
        let optimal_io_shift = self.max_io_bytes.trailing_zeros() as u8;
        let shifts = [
            LOGICAL_BLOCK_SHIFT,
            PHYSICAL_BLOCK_SHIFT,
            optimal_io_shift,
            PHYSICAL_BLOCK_SHIFT,
        ];
        bytes[12..16].copy_from_slice(&shifts);
        bytes[16..20].copy_from_slice(&sectors(self.max_io_bytes));
        bytes[24..32].copy_from_slice(&(self.size_bytes / SECTOR_BYTES).to_le_bytes());
        if self.is_writable {
            let granularity = 1_u32 << PHYSICAL_BLOCK_SHIFT;
            bytes[44..48].copy_from_slice(&granularity.to_le_bytes());
            bytes[48..52].copy_from_slice(&sectors(self.max_discard_bytes));
            bytes[52..56].copy_from_slice(&sectors(self.max_discard_bytes));
            bytes[56..58].copy_from_slice(&1_u16.to_le_bytes());
        }
        bytes
    }
}

/// Payload of a control command: `ublksrv_ctrl_cmd` in the 80 bytes of a large entry.
pub fn control_payload(number: u32, buffer: u64, buffer_bytes: u16, data: u64) -> [u8; 80] {
    let mut bytes = [0; 80];
    bytes[0..4].copy_from_slice(&number.to_le_bytes());
    bytes[4..6].copy_from_slice(&u16::MAX.to_le_bytes());
    bytes[6..8].copy_from_slice(&buffer_bytes.to_le_bytes());
    bytes[8..16].copy_from_slice(&buffer.to_le_bytes());
    bytes[16..24].copy_from_slice(&data.to_le_bytes());
    bytes
}

/// Payload of a slot's command: `ublksrv_io_cmd` for the only queue.
pub fn slot_payload(slot: u16, result: i32, buffer: u64) -> [u8; 16] {
    let mut bytes = [0; 16];
    bytes[2..4].copy_from_slice(&slot.to_le_bytes());
    bytes[4..8].copy_from_slice(&result.to_le_bytes());
    bytes[8..16].copy_from_slice(&buffer.to_le_bytes());
    bytes
}

/// Length of [`Descriptor`].
pub const DESCRIPTOR_BYTES: usize = 24;

/// `ublksrv_io_desc`: a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Descriptor {
    /// One of [`operation`].
    pub operation: u8,
    /// Durable before the answer.
    pub is_fua: bool,
    /// Where on the disk.
    pub offset_bytes: u64,
    /// How much.
    pub length_bytes: u64,
}

impl Descriptor {
    /// From the kernel.
    pub fn decode(bytes: &[u8; DESCRIPTOR_BYTES]) -> Descriptor {
        let word = word32(bytes, 0);
        Descriptor {
            operation: word as u8,
            is_fua: word & operation::FUA != 0,
            length_bytes: u64::from(word32(bytes, 4)) * SECTOR_BYTES,
            offset_bytes: word64(bytes, 8).saturating_mul(SECTOR_BYTES),
        }
    }
}

fn word32(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_le_bytes(word)
}

fn word64(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_le_bytes(word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_have_the_kernel_s_numbers() {
        assert_eq!(command::ADD_DEV, 0xC020_7504);
        assert_eq!(command::START_DEV, 0xC020_7506);
        assert_eq!(command::SET_PARAMS, 0xC020_7508);
        assert_eq!(command::GET_DEV_INFO, 0x8020_7502);
        assert_eq!(command::GET_FEATURES, 0x8020_7513);
        assert_eq!(slot_command::FETCH, 0xC010_7520);
        assert_eq!(slot_command::COMMIT_AND_FETCH, 0xC010_7521);
    }

    #[test]
    fn a_device_reads_back_as_it_was_written() {
        let info = DeviceInfo {
            queues: 1,
            depth: 64,
            state: state::QUIESCED,
            max_io_bytes: 1 << 18,
            number: 77,
            server_pid: -1,
            flags: flag::NEEDED,
            owner_tag: 0x0123_4567_89ab_cdef,
        };
        assert_eq!(DeviceInfo::decode(&info.encode()), info);
    }

    #[test]
    fn requests_count_in_sectors() {
        let mut bytes = [0; DESCRIPTOR_BYTES];
        bytes[0..4].copy_from_slice(&(operation::FUA | 1).to_le_bytes());
        bytes[4..8].copy_from_slice(&8_u32.to_le_bytes());
        bytes[8..16].copy_from_slice(&3_u64.to_le_bytes());
        let descriptor = Descriptor::decode(&bytes);
        let expected = Descriptor {
            operation: operation::WRITE,
            is_fua: true,
            offset_bytes: 1536,
            length_bytes: 4096,
        };
        assert_eq!(descriptor, expected);
    }

    #[test]
    fn a_read_only_disk_says_so_and_discards_nothing() {
        let mut parameters = Parameters {
            size_bytes: 1 << 20,
            is_writable: false,
            max_io_bytes: 1 << 18,
            max_discard_bytes: 1 << 30,
        };
        let bytes = parameters.encode();
        assert_eq!((word32(&bytes, 4), word32(&bytes, 8)), (1, 1));
        assert_eq!((word32(&bytes, 16), word64(&bytes, 24)), (512, 2048));
        assert!(bytes[32..].iter().all(|byte| *byte == 0));
        parameters.is_writable = true;
        let bytes = parameters.encode();
        assert_eq!((word32(&bytes, 4), word32(&bytes, 8)), (3, 12));
        assert_eq!((word32(&bytes, 44), word32(&bytes, 48)), (4096, 1 << 21));
    }
}
