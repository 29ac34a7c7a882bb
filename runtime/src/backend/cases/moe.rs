//! Cases of mixtures of experts as programs.
//!
//! Invariant: which experts a token has depends on its row of the table only, and no two scores are close, so that no rounding of
//! a backend changes a choice. Called by `build`.

use super::build::Builder;
use super::{HeadsCase, MoeCase};
use crate::ids::Slot;
use crate::program::{LinearPart, Op, Router, RouterScore};

impl Builder {
    /// A router of logits none of which are close.
    pub(super) fn moe_route(&mut self, experts: u32, router: Router, bias: bool, tokens: u32) -> Slot {
        let logits = self.router_logits(experts, tokens);
        let bias = bias.then(|| self.vector("bias", experts));
        let out = self.tokens_slot("out", 2 * router.top_k);
        self.program.ops.push(Op::MoeRoute { logits, bias, router, out });
        out
    }

    fn router_logits(&mut self, experts: u32, tokens: u32) -> Slot {
        let mut random = self.random();
        let mut values = Vec::new();
        for _ in 0..tokens {
            let mut ranks: Vec<u32> = (0..experts).collect();
            random.shuffle(&mut ranks);
            values.extend(ranks.iter().map(|&rank| 4.0 * (rank as f32 + 0.5) / experts as f32 - 2.0));
        }
        self.activations_of("logits", experts, &values)
    }

    pub(super) fn moe(&mut self, case: &MoeCase) -> Slot {
        let MoeCase { hidden, intermediate, experts, top_k, activation, tokens, .. } = *case;
        let router =
            Router { top_k, score: RouterScore::Softmax, groups: 1, top_groups: 1, renormalise: true, scale: 1.0 };
        let logits = self.router_logits(experts, tokens);
        let route = self.tokens_slot("route", 2 * top_k);
        self.program.ops.push(Op::MoeRoute { logits, bias: None, router, out: route });
        let x = self.activations("x", hidden, tokens);
        let gate = self.expert_part("gate", case, (intermediate, hidden));
        let up = self.expert_part("up", case, (intermediate, hidden));
        let product = self.tokens_slot("product", top_k * 2 * intermediate);
        self.program.ops.push(Op::MoeLinear { x, route: Some(route), parts: vec![gate, up], out: product });
        let gated = self.tokens_slot("gated", top_k * intermediate);
        self.program.ops.push(Op::GatedActivation { x: product, groups: top_k, activation, out: gated });
        let down = self.expert_part("down", case, (hidden, intermediate));
        let back = self.tokens_slot("back", top_k * hidden);
        self.program.ops.push(Op::MoeLinear { x: gated, route: Some(route), parts: vec![down], out: back });
        let residual = self.activations("residual", hidden, tokens);
        self.program.ops.push(Op::MoeCombine { x: back, route, residual });
        residual
    }

    /// Each head of an input times a matrix of its own.
    pub(super) fn per_head(&mut self, case: &HeadsCase) -> Slot {
        let HeadsCase { heads, in_features, out_features, format, tokens } = *case;
        let x = self.activations("x", heads * in_features, tokens);
        let shape = [heads, out_features, in_features].map(|n| n as usize).to_vec();
        let tensor = self.random().tensor("heads", format, shape);
        let parts = vec![LinearPart { weight: self.weight(tensor), bias: None }];
        let out = self.tokens_slot("out", heads * out_features);
        self.program.ops.push(Op::MoeLinear { x, route: None, parts, out });
        out
    }

    fn expert_part(&mut self, name: &str, case: &MoeCase, (rows, cols): (u32, u32)) -> LinearPart {
        let shape = vec![case.experts as usize, rows as usize, cols as usize];
        let tensor = self.random().tensor(name, case.format, shape);
        let weight = self.weight(tensor);
        let bias = case.bias.then(|| self.vector(&format!("{name}_bias"), case.experts * rows));
        LinearPart { weight, bias }
    }
}
