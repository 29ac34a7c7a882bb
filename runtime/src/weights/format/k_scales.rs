//! The 12 scale bytes that Q4_K and Q5_K share: eight 6-bit scales and eight 6-bit minimums, one pair per 32 elements.
//!
//! ```text
//! byte i     (0..4)   scale i in bits 0..6,        bits 4..6 of scale i + 4 in bits 6..8
//! byte i + 4 (0..4)   minimum i in bits 0..6,      bits 4..6 of minimum i + 4 in bits 6..8
//! byte i + 8 (0..4)   bits 0..4 of scale i + 4 in the low nibble, of minimum i + 4 in the high nibble
//! ```

/// Scale and minimum of the group `group` of 8.
pub(super) fn scale_and_min(bytes: &[u8], group: usize) -> (u8, u8) {
    if group < 4 {
        return (bytes[group] & 63, bytes[group + 4] & 63);
    }
    let low = bytes[group + 4];
    ((low & 0xf) | ((bytes[group - 4] >> 6) << 4), (low >> 4) | ((bytes[group] >> 6) << 4))
}
