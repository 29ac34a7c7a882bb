//! Measured shapes in a file (`kernel tune` writes it), by adapter: what may stand there, and which of it is this device's.
//!
//! Invariant: a table changes speed only. Every number is checked when it is read, and against the device's limits when the
//! device is opened; a field that is unknown or missing is an error, shapes of another adapter are left alone.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::adapter::AdapterInfo;
use crate::cache::write_whole;
use crate::layout::PANEL;
use crate::lower::PAD_ROWS;
use crate::tuning::{DeviceClass, LinearTile, Tuning};

/// Version of the file: what a version adds, the others do not have.
const FORMAT: u32 = 1;
/// Elements that a lane of a linear may sum at a time: more spill registers everywhere, and compile for minutes.
const MAX_TILE: u32 = 64;
/// Blocks of rows that a workgroup of a linear takes: more leave no work for the others, and rows of 16384 elements would take more
/// turns than software Vulkan lets a loop run (65535: per block two halves of 512 groups of eight vectors).
pub(crate) const MAX_NORM_BLOCKS: u32 = 4;
/// Lanes or items of anything: more than any device's workgroup.
const MAX_LANES: u32 = 1024;

/// Why a file of measured shapes cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{}: {problem} (`kittiwake kernel tune` makes such a file; without it the built-in shapes run)", file.display())]
pub struct TuningError {
    file: PathBuf,
    problem: String,
}

/// A file of measured shapes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TuningFile {
    format: u32,
    devices: Vec<Measured>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Measured {
    /// As its driver names it.
    adapter: String,
    /// Driver and version: another compiler, other shapes.
    driver: String,
    class: DeviceClass,
    tuning: Tuning,
}

impl Default for TuningFile {
    fn default() -> Self {
        Self { format: FORMAT, devices: Vec::new() }
    }
}

impl TuningFile {
    /// Reads and checks a file.
    ///
    /// # Errors
    /// It cannot be read, is no such file, or holds shapes that the kernels do not take.
    pub fn read(file: &Path) -> Result<Self, TuningError> {
        let failed = |problem: String| TuningError { file: file.to_owned(), problem };
        let text = std::fs::read_to_string(file).map_err(|error| failed(error.to_string()))?;
        let read: Self = serde_json::from_str(&text).map_err(|error| failed(error.to_string()))?;
        if read.format != FORMAT {
            return Err(failed(format!("format {}: this build knows format {FORMAT}", read.format)));
        }
        for Measured { adapter, tuning, .. } in &read.devices {
            tuning.check_shapes().map_err(|problem| failed(format!("{adapter}: {problem}")))?;
        }
        Ok(read)
    }

    /// Writes the file, whole or not at all.
    ///
    /// # Errors
    /// What the system says.
    pub fn write(&self, file: &Path) -> Result<(), TuningError> {
        let failed = |problem: String| TuningError { file: file.to_owned(), problem };
        let text = serde_json::to_string_pretty(self).map_err(|error| failed(error.to_string()))?;
        write_whole(file, (text + "\n").as_bytes()).map_err(|error| failed(error.to_string()))
    }

    /// Puts a device's shapes in the place of those that it had.
    pub fn set(&mut self, adapter: &AdapterInfo, tuning: Tuning) {
        let AdapterInfo { name, driver, class, .. } = adapter.clone();
        self.devices.retain(|known| !known.is_of(adapter, class));
        self.devices.push(Measured { adapter: name, driver, class, tuning });
    }

    /// The shapes that were measured on this adapter as a device of this class.
    pub fn of(&self, adapter: &AdapterInfo, class: DeviceClass) -> Option<&Tuning> {
        let found = self.devices.iter().find(|known| known.is_of(adapter, class));
        if found.is_none() {
            let (adapter, driver) = (&adapter.name, &adapter.driver);
            tracing::debug!(adapter, driver, class = class.name(), "the tuning table has no shapes of this device");
        }
        found.map(|measured| &measured.tuning)
    }
}

impl Measured {
    fn is_of(&self, adapter: &AdapterInfo, class: DeviceClass) -> bool {
        (&self.adapter, &self.driver, self.class) == (&adapter.name, &adapter.driver, class)
    }
}

/// `Err` names a number and its range.
fn within(what: &str, number: u32, least: u32, most: u32) -> Result<(), String> {
    if (least..=most).contains(&number) {
        return Ok(());
    }
    Err(format!("{what} {number}: expected {least} to {most}"))
}

impl Tuning {
    /// Whether the kernels take these shapes, on any device.
    ///
    /// # Errors
    /// The first that they do not take.
    pub fn check_shapes(&self) -> Result<(), String> {
        within("flat_lanes", self.flat_lanes, 1, MAX_LANES)?;
        within("row_lanes", self.row_lanes, 1, MAX_LANES)?;
        if !self.row_lanes.is_power_of_two() {
            return Err(format!("row_lanes {}: expected a power of two", self.row_lanes));
        }
        within("splits", self.splits, 1, MAX_TILE)?;
        if self.linear.first().is_none_or(|tile| tile.from_tokens != 1) {
            return Err("linear: the first tile must be from_tokens 1".into());
        }
        if !self.linear.is_sorted_by(|a, b| a.from_tokens < b.from_tokens) {
            return Err("linear: from_tokens must ascend".into());
        }
        for tile in self.linear.iter() {
            let LinearTile { from_tokens, rows, tokens, lanes, token_lanes, .. } = *tile;
            let divides =
                |a: u32, b: u32, whole: u32| a.checked_mul(b).is_some_and(|n| n > 0 && whole.is_multiple_of(n));
            if !divides(rows, lanes, PANEL as u32) || !divides(tokens, token_lanes, PAD_ROWS) {
                return Err(format!(
                    "linear from_tokens {from_tokens}: rows {rows} * lanes {lanes} must divide {PANEL}, \
                     tokens {tokens} * token_lanes {token_lanes} must divide {PAD_ROWS}"
                ));
            }
            within(&format!("linear from_tokens {from_tokens}: rows * tokens"), rows * tokens, 1, MAX_TILE)?;
            within(&format!("linear from_tokens {from_tokens}: norm_blocks"), tile.norm_blocks, 0, MAX_NORM_BLOCKS)?;
        }
        let tile = &self.attention;
        within("attention: split", tile.split, 1, 1 << 20)?;
        within("attention: items", tile.items, 1, MAX_LANES)?;
        within("attention: parts", tile.parts, 1, MAX_LANES)?;
        within("attention: max_values", tile.max_values, 1, MAX_LANES)?;
        // The self-test of the split kernels has two tokens.
        within("attention: max_split_tokens", tile.max_split_tokens, 2, PAD_ROWS)
    }

    /// Whether a device of these limits takes these shapes, too.
    ///
    /// # Errors
    /// The first that it does not take, with the limit.
    pub(crate) fn check(&self, limits: &wgpu::Limits) -> Result<(), String> {
        self.check_shapes()?;
        let fits = |what: &str, [x, y, z]: [u32; 3]| {
            let lanes = u64::from(x) * u64::from(y) * u64::from(z);
            let is_within = x <= limits.max_compute_workgroup_size_x
                && y <= limits.max_compute_workgroup_size_y
                && z <= limits.max_compute_workgroup_size_z
                && lanes <= u64::from(limits.max_compute_invocations_per_workgroup);
            let most = limits.max_compute_invocations_per_workgroup;
            let problem =
                || format!("{what}: a workgroup of {x} x {y} x {z} lanes passes this device's limit of {most}");
            is_within.then_some(()).ok_or_else(problem)
        };
        fits("flat_lanes", [self.flat_lanes, 1, 1])?;
        fits("row_lanes", [self.row_lanes, 1, 1])?;
        fits("attention: items * parts", [self.attention.items, self.attention.parts, 1])?;
        for tile in self.linear.iter() {
            let what = format!("linear from_tokens {}", tile.from_tokens);
            let slices = if tile.split_lanes { self.splits } else { 1 };
            fits(&what, [tile.lanes, tile.token_lanes, slices])?;
            let sums = if slices > 1 { tile.lanes * tile.token_lanes * slices * tile.rows * tile.tokens } else { 0 };
            let most = limits.max_compute_workgroup_storage_size;
            if 4 * u64::from(sums) > u64::from(most) {
                return Err(format!("{what}: {sums} partial sums do not fit {most} bytes of workgroup memory"));
            }
        }
        Ok(())
    }
}
