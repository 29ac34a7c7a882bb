// The values of x that a lane multiplies: it loads them itself. Lanes that want the same ones meet in the cache.
struct Lane {
    @builtin(workgroup_id) workgroup: vec3u,
    @builtin(local_invocation_id) local: vec3u,
}

struct Inputs {
    first: u32,
}

// The group's eight vectors of x from `first` on.
fn load_inputs(first: u32, lane: Lane) -> Inputs {
    return Inputs(first);
}

fn input_at(inputs: Inputs, i: u32, lane: Lane) -> vec4f {
    return x[inputs.first + i];
}
