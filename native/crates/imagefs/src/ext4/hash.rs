//! The hash by which large directories are sorted: half of an MD4 over the name, with signed bytes.

const START: [u32; 4] = [0x6745_2301, 0xefcd_ab89, 0x98ba_dcfe, 0x1032_5476];
const SECOND: u32 = 0x5a82_7999;
const THIRD: u32 = 0x6ed9_eba1;
const WORDS: usize = 8;

/// The hash of a name and, for names of equal hash, the minor hash.
pub fn half_md4(name: &[u8], seed: &[u32; 4]) -> (u32, u32) {
    let mut state = if *seed == [0; 4] { START } else { *seed };
    let mut left = name;
    while !left.is_empty() {
        mix(&mut state, &words(left));
        left = &left[left.len().min(WORDS * 4)..];
    }
    (state[1] & !1, state[2])
}

/// Up to 32 bytes as 8 words, each high byte first; what is missing is filled with the length.
fn words(bytes: &[u8]) -> [u32; WORDS] {
    let length = bytes.len() as u32;
    let pad = (length | length << 8) | (length | length << 8) << 16;
    let mut words = [pad; WORDS];
    for (index, chunk) in bytes.chunks(4).take(WORDS).enumerate() {
        words[index] = chunk.iter().fold(pad, |value, byte| {
            (i32::from(*byte as i8) as u32).wrapping_add(value << 8)
        });
    }
    words
}

fn mix(state: &mut [u32; 4], words: &[u32; WORDS]) {
    type Mixer = fn(u32, u32, u32) -> u32;
    const ROUNDS: [(Mixer, u32, [usize; WORDS], [u32; 4]); 3] = [
        (
            |x, y, z| z ^ (x & (y ^ z)),
            0,
            [0, 1, 2, 3, 4, 5, 6, 7],
            [3, 7, 11, 19],
        ),
        (
            |x, y, z| (x & y).wrapping_add((x ^ y) & z),
            SECOND,
            [1, 3, 5, 7, 0, 2, 4, 6],
            [3, 5, 9, 13],
        ),
        (
            |x, y, z| x ^ y ^ z,
            THIRD,
            [3, 7, 2, 6, 1, 5, 0, 4],
            [3, 9, 11, 15],
        ),
    ];
    let mut s = *state;
    for (mixer, constant, order, turns) in ROUNDS {
        for (step, word) in order.into_iter().enumerate() {
            let sum = s[0]
                .wrapping_add(mixer(s[1], s[2], s[3]))
                .wrapping_add(words[word].wrapping_add(constant))
                .rotate_left(turns[step % 4]);
            s = [s[3], sum, s[1], s[2]];
        }
    }
    for (old, new) in state.iter_mut().zip(s) {
        *old = old.wrapping_add(new);
    }
}
