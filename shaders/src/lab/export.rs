//! `kernel export`: what a driver sees of a kernel, in the language of its API.
//!
//! Invariant: translated as the backend does when it serves: no runtime checks, no zeroed workgroup memory.

use std::fmt;
use std::str::FromStr;

use naga::back::{glsl, hlsl, msl, spv};
use naga::proc::{BoundsCheckPolicies, BoundsCheckPolicy};
use naga::{ResourceBinding, ShaderStage};

use super::{CustomKernel, KernelError};
use crate::compose::Settings;
use crate::reflect::{Access, Checked, check};

/// A language that drivers take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// Vulkan: SPIR-V 1.3, little-endian words.
    Spirv,
    /// Metal Shading Language 2.4.
    Msl,
    /// HLSL, shader model 6.0.
    Hlsl,
    /// GLSL 4.50.
    Glsl,
}

impl Target {
    /// Every target.
    pub const ALL: [Self; 4] = [Self::Spirv, Self::Msl, Self::Hlsl, Self::Glsl];
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Spirv => "spirv",
            Self::Msl => "msl",
            Self::Hlsl => "hlsl",
            Self::Glsl => "glsl",
        })
    }
}

impl FromStr for Target {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        let known: Vec<String> = Self::ALL.iter().map(Self::to_string).collect();
        let found = Self::ALL.into_iter().find(|target| target.to_string() == name);
        found.ok_or_else(|| format!("'{name}' is none of {}", known.join(", ")))
    }
}

/// Translates a kernel with every setting that is not pinned at its default.
///
/// # Errors
/// Something that the target cannot say, e.g. subgroup operations in GLSL.
pub fn export(kernel: &CustomKernel, target: Target) -> Result<Vec<u8>, KernelError> {
    let checked = check(&kernel.compose(&Settings::new())?)?;
    let said = match target {
        Target::Spirv => spirv(&checked),
        Target::Msl => metal(&checked),
        Target::Hlsl => hlsl(&checked),
        Target::Glsl => glsl(&checked),
    };
    said.map_err(|problem| KernelError::Wrong { file: kernel.file.clone(), problem: format!("to {target}: {problem}") })
}

const UNCHECKED: BoundsCheckPolicies = BoundsCheckPolicies {
    index: BoundsCheckPolicy::Unchecked,
    buffer: BoundsCheckPolicy::Unchecked,
    image_load: BoundsCheckPolicy::Unchecked,
    binding_array: BoundsCheckPolicy::Unchecked,
};

fn spirv(checked: &Checked) -> Result<Vec<u8>, String> {
    let options = spv::Options {
        lang_version: (1, 3),
        flags: spv::WriterFlags::DEBUG | spv::WriterFlags::LABEL_VARYINGS,
        bounds_check_policies: UNCHECKED,
        zero_initialize_workgroup_memory: spv::ZeroInitializeWorkgroupMemoryMode::None,
        force_loop_bounding: false,
        emit_int_div_checks: false,
        ..spv::Options::default()
    };
    let words = spv::write_vec(&checked.module, &checked.info, &options, None).map_err(|error| error.to_string())?;
    Ok(words.iter().flat_map(|word| word.to_le_bytes()).collect())
}

fn metal(checked: &Checked) -> Result<Vec<u8>, String> {
    let bindings = &checked.interface.bindings;
    let slot = |i: usize| u8::try_from(i).map_err(|_| "too many bindings".to_owned());
    let mut resources = msl::BindingMap::default();
    for binding in bindings {
        let target = msl::BindTarget {
            buffer: Some(slot(binding.index as usize)?),
            mutable: binding.access == Access::ReadWrite,
            ..msl::BindTarget::default()
        };
        resources.insert(ResourceBinding { group: 0, binding: binding.index }, target);
    }
    let entry = msl::EntryPointResources {
        resources,
        sizes_buffer: Some(slot(bindings.len())?),
        ..msl::EntryPointResources::default()
    };
    let options = msl::Options {
        lang_version: (2, 4),
        per_entry_point_map: std::iter::once(("main".to_owned(), entry)).collect(),
        fake_missing_bindings: false,
        bounds_check_policies: UNCHECKED,
        zero_initialize_workgroup_memory: false,
        force_loop_bounding: false,
        emit_int_div_checks: false,
        ..msl::Options::default()
    };
    let pipeline = msl::PipelineOptions::default();
    let (text, _) =
        msl::write_string(&checked.module, &checked.info, &options, &pipeline).map_err(|error| error.to_string())?;
    Ok(text.into_bytes())
}

fn hlsl(checked: &Checked) -> Result<Vec<u8>, String> {
    let options = hlsl::Options {
        shader_model: hlsl::ShaderModel::V6_0,
        zero_initialize_workgroup_memory: false,
        restrict_indexing: false,
        force_loop_bounding: false,
        ..hlsl::Options::default()
    };
    let mut text = String::new();
    let pipeline = hlsl::PipelineOptions::default();
    let mut writer = hlsl::Writer::new(&mut text, &options, &pipeline);
    writer.write(&checked.module, &checked.info, None).map_err(|error| error.to_string())?;
    Ok(text.into_bytes())
}

fn glsl(checked: &Checked) -> Result<Vec<u8>, String> {
    let options = glsl::Options {
        version: glsl::Version::Desktop(450),
        zero_initialize_workgroup_memory: false,
        ..glsl::Options::default()
    };
    let pipeline =
        glsl::PipelineOptions { shader_stage: ShaderStage::Compute, entry_point: "main".into(), multiview: None };
    let mut text = String::new();
    let mut writer = glsl::Writer::new(&mut text, &checked.module, &checked.info, &options, &pipeline, UNCHECKED)
        .map_err(|error| error.to_string())?;
    writer.write().map_err(|error| error.to_string())?;
    Ok(text.into_bytes())
}
