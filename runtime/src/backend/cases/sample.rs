//! The cases of `Sample`: logits that are the same bits on every backend, and samples as numbers that can be compared.
//!
//! Invariant: logits are a product with rows that have one element, so that no sum rounds and no width is too odd. Everything
//! but the sum of exponentials is exact: the tolerance is for the sum. Called by `build_case` and `run_built`.

use super::SampleCase;
use super::build::{Builder, BuiltCase, Observed};
use super::random::Random;
use crate::program::{LinearPart, Op, RowDim};
use crate::sample::{Draw, MAX_TOP, Sample};
use crate::weights::HostTensor;

/// Columns of the matrix whose columns are the rows of logits: what every format and backend takes.
const COLUMNS: usize = 32;

/// What becomes of a row of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    AsAsked,
    Greedy,
    TokenOnly,
    /// Logits from a few values only.
    Ties,
    NotFinite,
    Read,
}

impl Kind {
    fn of(row: u32) -> Self {
        use Kind::{AsAsked, Greedy, NotFinite, Read, Ties, TokenOnly};
        [AsAsked, Ties, Greedy, Read, NotFinite, TokenOnly][row as usize % 6]
    }
}

pub(super) fn build_sample(mut builder: Builder, case: &SampleCase) -> BuiltCase {
    let SampleCase { vocab, rows, .. } = *case;
    assert!(rows as usize <= COLUMNS, "a case has at most {COLUMNS} rows");
    let seed = builder.seed;
    // Row i of x has one element, which picks column i.
    let mut x = vec![0.0; rows as usize * COLUMNS];
    let mut matrix = vec![0.0; vocab as usize * COLUMNS];
    for row in 0..rows {
        let mut random = Random::new(seed, 2000 + u64::from(row));
        let kind = Kind::of(row);
        for logits in matrix.chunks_exact_mut(COLUMNS) {
            // Peaked as those of models are: a few stand out.
            let value = random.uniform(-1.0, 1.0);
            let logit = value * value * value * 12.0;
            logits[row as usize] = if kind == Kind::Ties { logit.round() / 2.0 } else { logit };
        }
        x[row as usize * COLUMNS + row as usize] = 1.0;
        if kind == Kind::NotFinite {
            x[row as usize * COLUMNS + row as usize] = 4.0;
            matrix[(random.next_u64() % u64::from(vocab)) as usize * COLUMNS + row as usize] = f32::MAX;
        }
    }
    let x = builder.activations_of("x", COLUMNS as u32, &x);
    let weight = builder.weight(HostTensor::from_f32("head", vec![vocab as usize, COLUMNS], &matrix));
    let last = builder.slot("last", RowDim::LogitRows, COLUMNS as u32);
    builder.program.ops.push(Op::SelectRows { x, out: last });
    let logits = builder.slot("logits", RowDim::LogitRows, vocab);
    let parts = vec![LinearPart { weight, bias: None }];
    builder.program.ops.push(Op::Linear { x: last, parts, out: logits });
    builder.program.ops.push(Op::Sample { logits });
    builder.program.logits = Some(logits);
    builder.finish_with(0, rows, rows, Observed::Samples, |step| {
        let (read, sampled): (Vec<u32>, Vec<u32>) = (0..rows).partition(|&row| Kind::of(row) == Kind::Read);
        read.into_iter().for_each(|row| step.push_logit_row(row));
        sampled.into_iter().for_each(|row| step.push_sampled_row(row, draw_of(case, row, seed)));
    })
}

fn draw_of(case: &SampleCase, row: u32, seed: u64) -> Draw {
    let kind = Kind::of(row);
    let is_greedy = kind == Kind::Greedy || case.temperature == 0.0;
    Draw {
        inverse_temperature: if is_greedy { 0.0 } else { 1.0 / case.temperature },
        seed: Random::new(seed, u64::from(row)).next_u64(),
        position: 17 * row,
        logprobs: if kind == Kind::TokenOnly { None } else { case.logprobs },
    }
}

/// Numbers of a sample: whether it is finite, id, logit, rank and logarithm of the sum, then the best tokens and their logits.
pub const SAMPLE_COLUMNS: usize = 5 + 2 * MAX_TOP;

/// The samples of a case as numbers of about one scale: ids and ranks as fractions of the vocabulary.
pub(super) fn values(built: &BuiltCase, samples: &[Sample]) -> Vec<f32> {
    let logits = built.program.logits.expect("a case has logits");
    let vocab = built.program.slots[logits.index()].width as f32;
    let mut values = Vec::new();
    for (draw, sample) in built.step.draws().zip(samples) {
        let mut row = [0.0; SAMPLE_COLUMNS];
        if let Some(chosen) = sample.chosen(&draw) {
            row[0] = 1.0;
            row[1] = chosen.id as f32 / vocab;
            row[2] = chosen.logit;
            if draw.logprobs.is_some() {
                row[3] = chosen.rank as f32 / vocab;
                row[4] = sample.sum_of_exp().ln() as f32;
                for (pair, top) in row[5..].chunks_exact_mut(2).zip(sample.top()) {
                    pair.copy_from_slice(&[top.id as f32 / vocab, top.logit]);
                }
            }
        }
        values.extend(row);
    }
    values
}
