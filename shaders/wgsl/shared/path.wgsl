// Where the positions that a token sees lie in its row's cache: in order, but for those of a tree, which are tokens of one path
// among all that the step computes. A kernel that uses this declares `step` and has tree_masks in its Params.

// The row's positions from `first` on are those of its tokens in this step whose bits are set, in order.
struct Path {
    first: u32,
    mask: vec2u,
}

// The path of a token whose position is the last before `position_end`.
fn path_of(token: u32, position_end: u32) -> Path {
    if step[4] > 0u {
        let at = params.tree_masks + 2u * token;
        let mask = vec2u(step[at], step[at + 1u]);
        let own = countOneBits(mask.x) + countOneBits(mask.y);
        if own > 0u {
            return Path(position_end - own, mask);
        }
    }
    return Path(0xffffffffu, vec2u());
}

// The index in the row's cache of a position that a token sees.
fn cache_index(path: Path, position: u32) -> u32 {
    if position < path.first {
        return position;
    }
    var rest = path.mask;
    for (var before = path.first; before < position; before++) {
        if rest.x != 0u {
            rest.x &= rest.x - 1u;
        } else {
            rest.y &= rest.y - 1u;
        }
    }
    return path.first + select(32u + firstTrailingBit(rest.y), firstTrailingBit(rest.x), rest.x != 0u);
}
