//! Frequencies of the rotary embedding, computed once at load in f32 as the official implementation does.
//!
//! Invariant: scaling is all in `inv_freq`; the op knows nothing of it. Called by the architectures through `layers`.

/// Base and scaling.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct RopeConfig {
    /// The base of the geometric series.
    pub theta: f32,
    /// How long contexts stretch it.
    pub scaling: RopeScaling,
}

/// Scaling of the frequencies.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum RopeScaling {
    /// As trained.
    None,
    /// All divided by `factor` (Chen et al. 2023, "Extending Context Window of Large Language Models via Positional
    /// Interpolation").
    Linear { factor: f32 },
    /// Long wavelengths divided by `factor`, short ones kept, a linear blend between (Llama 3.1; `_compute_llama3_parameters`
    /// in transformers' `modeling_rope_utils`).
    Llama3 { factor: f32, low_freq_factor: f32, high_freq_factor: f32, original_max_position: f32 },
}

impl RopeConfig {
    /// What files that do not say mean.
    pub const DEFAULT_THETA: f32 = 10_000.0;

    /// `[head_dim / 2]`: `theta^(-2i / head_dim)` (Su et al. 2021, "RoFormer"), scaled.
    pub fn inv_freq(&self, head_dim: u32) -> Vec<f32> {
        let plain = (0..head_dim / 2).map(|i| 1.0 / self.theta.powf((2 * i) as f32 / head_dim as f32));
        plain.map(|frequency| self.scaled(frequency)).collect()
    }

    fn scaled(&self, frequency: f32) -> f32 {
        match self.scaling {
            RopeScaling::None => frequency,
            RopeScaling::Linear { factor } => frequency / factor,
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => {
                let wavelength = 2.0 * std::f32::consts::PI / frequency;
                if wavelength < original_max_position / high_freq_factor {
                    frequency
                } else if wavelength > original_max_position / low_freq_factor {
                    frequency / factor
                } else {
                    let turns = original_max_position / wavelength;
                    let smooth = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    (1.0 - smooth) * frequency / factor + smooth * frequency
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama3_keeps_short_waves_and_stretches_long_ones() {
        let plain = RopeConfig { theta: 500_000.0, scaling: RopeScaling::None };
        let scaling = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_max_position: 8192.0,
        };
        let (plain, scaled) = (plain.inv_freq(128), RopeConfig { scaling, ..plain }.inv_freq(128));
        assert_eq!(scaled[0], 1.0);
        assert_eq!(scaled[63], plain[63] / 8.0);
        // Wavelength of pair 32 is 4443: 1.84 turns in 8192, so smooth is 0.281.
        assert!((scaled[32] / plain[32] - (0.719 / 8.0 + 0.281)).abs() < 1e-3);
        let ratios: Vec<f32> = scaled.iter().zip(&plain).map(|(s, p)| s / p).collect();
        assert!(ratios.windows(2).all(|pair| pair[1] <= pair[0] + 1e-6));
    }
}
