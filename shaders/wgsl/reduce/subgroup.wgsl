// Sum over the REDUCE_LANES lanes of a workgroup: first within subgroups of whatever size, then over the lanes that lead one.
// The device must have subgroup operations. A lane that leads no subgroup leaves a zero.
var<workgroup> reduce_partial: array<f32, REDUCE_LANES>;

fn reduce_sum(value: f32, lane: u32) -> f32 {
    let sum = subgroupAdd(value);
    reduce_partial[lane] = select(0.0, sum, subgroupExclusiveAdd(1u) == 0u);
    workgroupBarrier();
    var total = 0.0;
    for (var i = 0u; i < REDUCE_LANES; i++) {
        total += reduce_partial[i];
    }
    return total;
}
