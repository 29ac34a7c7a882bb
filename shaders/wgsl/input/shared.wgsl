// The values of x that a lane multiplies: eight lanes of a subgroup load one vector of the group each, once, and hand them
// round: where loads are dear (software Vulkan). A subgroup's lanes want the same values: TOKEN_LANES and SPLIT_LANES are 1,
// LANES is a multiple of 8. Smaller subgroups than eight lanes load for themselves. The device must have subgroup operations.
// The squares of a row are summed by eight lanes, without a barrier: after one, software Vulkan keeps every variable in memory.
//!targets spirv msl hlsl
const_assert LANES % 8u == 0u && TOKEN_LANES == 1u && SPLIT_LANES == 1u;

struct Lane {
    @builtin(local_invocation_id) local: vec3u,
    @builtin(subgroup_invocation_id) in_subgroup: u32,
    @builtin(subgroup_size) subgroup: u32,
}

struct Inputs {
    row: u32,
    column: u32,
    factor: f32,
    mine: vec4f,
}

// The group's eight vectors of a row of x from `column` on, normed by `factor`.
fn load_inputs(row: u32, column: u32, factor: f32, lane: Lane) -> Inputs {
    return Inputs(row, column, factor, x_at(row, column + lane.in_subgroup % 8u, factor));
}

// A compiler cannot see that the lanes of a subgroup share all conditions that lead here.
@diagnostic(off, subgroup_uniformity)
fn input_at(inputs: Inputs, i: u32, lane: Lane) -> vec4f {
    if lane.subgroup < 8u {
        return x_at(inputs.row, inputs.column + i, inputs.factor);
    }
    return subgroupShuffle(inputs.mine, i);
}

// In the order of reduce/workgroup.wgsl.
@diagnostic(off, subgroup_uniformity)
fn row_squares(row: u32, lane: Lane) -> f32 {
    if lane.subgroup < 8u {
        var sums: array<f32, 8>;
        for (var i = 0u; i < 8u; i++) {
            sums[i] = squares_of(row, i, 8u);
        }
        return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
    }
    var sum = squares_of(row, lane.in_subgroup % 8u, 8u);
    sum += subgroupShuffleXor(sum, 4u);
    sum += subgroupShuffleXor(sum, 2u);
    sum += subgroupShuffleXor(sum, 1u);
    return sum;
}
