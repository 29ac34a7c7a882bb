// What four 4-bit codes stand for: a table of 16 signed bytes, the first in the lowest byte of the first word. Selections, because
// compilers keep an array that is indexed at run time in memory.
fn look_up(table: vec4u, code: vec4u) -> vec4f {
    let upper = (code & vec4u(4u)) != vec4u();
    let low = select(vec4u(table.x), vec4u(table.y), upper);
    let high = select(vec4u(table.z), vec4u(table.w), upper);
    let words = select(low, high, (code & vec4u(8u)) != vec4u());
    return vec4f(bitcast<vec4i>(words << (vec4u(24u) - vec4u(8u) * (code & vec4u(3u)))) >> vec4u(24u));
}
