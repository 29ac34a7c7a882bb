// Which positions a token sees, and which splits they lie in.
// A kernel that uses this declares SPLIT, WINDOW and `step`, and has window and window_splits in its Params.

// The first of the positions before `position_end`: without a window the row's first.
fn first_seen(position_end: u32) -> u32 {
    if WINDOW {
        return position_end - min(position_end, params.window);
    }
    return 0u;
}

// No token of the step has more splits, counted from that of the first position it sees.
fn splits_per_token() -> u32 {
    let all = (step[3] + SPLIT - 1u) / SPLIT;
    if WINDOW {
        return min(all, params.window_splits);
    }
    return all;
}
