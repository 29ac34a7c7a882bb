// Sum over the REDUCE_LANES lanes of a workgroup, in a tree through workgroup memory: one order for every device. REDUCE_LANES is a power of 2.
var<workgroup> reduce_partial: array<f32, REDUCE_LANES>;

fn reduce_sum(value: f32, lane: u32) -> f32 {
    reduce_partial[lane] = value;
    for (var half = REDUCE_LANES / 2u; half > 0u; half /= 2u) {
        workgroupBarrier();
        if lane < half {
            reduce_partial[lane] += reduce_partial[lane + half];
        }
    }
    workgroupBarrier();
    return reduce_partial[0];
}
