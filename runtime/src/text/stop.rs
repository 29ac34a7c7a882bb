//! Stop strings: found in text as it streams, wherever tokens and pieces happen to end.
//!
//! Invariant: text leaves as soon as it cannot become part of a stop string any more, and never before; the text and the
//! match are the same however the same text is cut into pieces. One Knuth-Morris-Pratt automaton per stop string
//! gives both the matches and the longest suffix that may still become one, at a constant cost per byte. `TextStream`
//! feeds it. All cuts are at scalar boundaries, because both stop strings and pieces are whole scalars.

/// Finds the stop string that ends first (of those that end together, the longest).
#[derive(Clone, Debug)]
pub struct StopMatcher {
    stops: Vec<Automaton>,
    include_stop: bool,
    /// Text that may become a stop string.
    held: String,
    matched: Option<usize>,
}

impl StopMatcher {
    /// A matcher of `stops` (empty ones never match); a match is left out of the text unless `include_stop`.
    pub fn new(stops: &[String], include_stop: bool) -> Self {
        let stops = stops.iter().map(|stop| Automaton::new(stop)).collect();
        Self { stops, include_stop, held: String::new(), matched: None }
    }

    /// Takes more text and returns what is safe to show. A match counts only if it ends inside text that came `armed`.
    /// After a match everything is swallowed.
    pub fn push(&mut self, piece: &str, armed: bool) -> String {
        if self.matched.is_some() {
            return String::new();
        }
        let old_len = self.held.len();
        self.held.push_str(piece);
        for (i, &byte) in piece.as_bytes().iter().enumerate() {
            let mut found: Option<(usize, usize)> = None;
            for (index, stop) in self.stops.iter_mut().enumerate() {
                if stop.step(byte) && armed && found.is_none_or(|(len, _)| stop.pattern.len() > len) {
                    found = Some((stop.pattern.len(), index));
                }
            }
            if let Some((len, index)) = found {
                self.matched = Some(index);
                let end = old_len + i + 1;
                self.held.truncate(if self.include_stop { end } else { end - len });
                return std::mem::take(&mut self.held);
            }
        }
        let hold = self.stops.iter().map(|stop| stop.state).max().unwrap_or(0);
        let waiting = self.held.split_off(self.held.len() - hold);
        std::mem::replace(&mut self.held, waiting)
    }

    /// Ends the text: what was held back is not a stop string after all.
    pub fn flush(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Which stop string matched, as an index into the list given to `new`.
    pub fn matched(&self) -> Option<usize> {
        self.matched
    }
}

/// How much of one pattern the text's end matches (Knuth, Morris and Pratt, 1977).
#[derive(Clone, Debug)]
struct Automaton {
    pattern: Box<[u8]>,
    /// `fallback[n]`: the longest proper prefix of the pattern that is also a suffix of its first `n + 1` bytes.
    fallback: Box<[usize]>,
    /// Length of the longest proper prefix of the pattern that the text so far ends with.
    state: usize,
}

impl Automaton {
    fn new(pattern: &str) -> Self {
        let pattern: Box<[u8]> = pattern.as_bytes().into();
        let mut fallback = vec![0; pattern.len()];
        let mut len = 0;
        for i in 1..pattern.len() {
            while len > 0 && pattern[len] != pattern[i] {
                len = fallback[len - 1];
            }
            len += usize::from(pattern[len] == pattern[i]);
            fallback[i] = len;
        }
        Self { pattern, fallback: fallback.into(), state: 0 }
    }

    /// Takes one byte; says whether the text now ends with the whole pattern.
    fn step(&mut self, byte: u8) -> bool {
        if self.pattern.is_empty() {
            return false;
        }
        while self.state > 0 && self.pattern[self.state] != byte {
            self.state = self.fallback[self.state - 1];
        }
        self.state += usize::from(self.pattern[self.state] == byte);
        let whole = self.state == self.pattern.len();
        if whole {
            self.state = self.fallback[self.state - 1];
        }
        whole
    }
}
