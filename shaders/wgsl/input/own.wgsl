// The values of x that a lane multiplies: it loads them itself. Lanes that want the same ones meet in the cache.
// The squares of a row are summed by all lanes of the workgroup.
//!use reduce/workgroup.wgsl
const REDUCE_LANES: u32 = LANES * TOKEN_LANES * SPLIT_LANES;
struct Lane {
    @builtin(local_invocation_id) local: vec3u,
}

struct Inputs {
    row: u32,
    column: u32,
    factor: f32,
}

// The group's eight vectors of a row of x from `column` on, normed by `factor`.
fn load_inputs(row: u32, column: u32, factor: f32, lane: Lane) -> Inputs {
    return Inputs(row, column, factor);
}

fn input_at(inputs: Inputs, i: u32, lane: Lane) -> vec4f {
    return x_at(inputs.row, inputs.column + i, inputs.factor);
}

fn row_squares(row: u32, lane: Lane) -> f32 {
    let index = lane.local.z * LANES + lane.local.x;
    // What was summed before has been read.
    workgroupBarrier();
    return reduce_sum(squares_of(row, index, REDUCE_LANES), index);
}
