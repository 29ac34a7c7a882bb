// The values of x that a lane multiplies: eight lanes of a subgroup load one vector of the group each, once, and hand them
// round: where loads are dear (software Vulkan). A subgroup's lanes want the same values: TOKEN_LANES and SPLIT_LANES are 1,
// LANES is a multiple of 8. Smaller subgroups than eight lanes load for themselves. The device must have subgroup operations.
//!targets spirv msl hlsl
const_assert LANES % 8u == 0u && TOKEN_LANES == 1u && SPLIT_LANES == 1u;

struct Lane {
    @builtin(workgroup_id) workgroup: vec3u,
    @builtin(local_invocation_id) local: vec3u,
    @builtin(subgroup_invocation_id) in_subgroup: u32,
    @builtin(subgroup_size) subgroup: u32,
}

struct Inputs {
    first: u32,
    mine: vec4f,
}

// The group's eight vectors of x from `first` on.
fn load_inputs(first: u32, lane: Lane) -> Inputs {
    return Inputs(first, x[first + lane.in_subgroup % 8u]);
}

// A compiler cannot see that the lanes of a subgroup share all conditions that lead here.
@diagnostic(off, subgroup_uniformity)
fn input_at(inputs: Inputs, i: u32, lane: Lane) -> vec4f {
    if lane.subgroup < 8u {
        return x[inputs.first + i];
    }
    return subgroupShuffle(inputs.mine, i);
}
