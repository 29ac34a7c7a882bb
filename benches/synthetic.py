#!/usr/bin/env python3
"""Makes models with the shape of a 1.1B Llama and made-up weights, for measurements of speed only.

    python3 benches/synthetic.py [NAME ...]      (default: all of them)

    q4_0, q4_k_m, q8_0   GGUF files, by llama.cpp's own quantiser from one file of f16
    int4, int4-asym      Hugging Face directories in the layout of compressed-tensors, groups of 128

They lie in `.cache/synthetic` (git-ignored, 4 GB, the f16 file is removed) as llama-1b-NAME[.gguf]. Needs what
benches/peer_llama_cpp.py needs on the cpu, which builds llama.cpp; numpy, gguf and safetensors come from PyPI.
"""

import json
import subprocess
import sys
from pathlib import Path

import peer_llama_cpp as peer

FOLDER = peer.ROOT / ".cache" / "synthetic"
PACKAGES = ["numpy==2.4.6", "gguf==0.19.0", "safetensors==0.8.0"]
GGUF = {"q4_0": "Q4_0", "q4_k_m": "Q4_K_M", "q8_0": "Q8_0"}
DIRECTORIES = {"int4": True, "int4-asym": False}

# TinyLlama's shape (Zhang et al. 2024).
HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, VOCAB, CONTEXT = 2048, 5632, 22, 32, 4, 32000, 4096
GROUP = 128
KV_WIDTH = HIDDEN // HEADS * KV_HEADS
# Name in GGUF files, in Hugging Face files, rows and columns.
LINEARS = [
    ("attn_q", "self_attn.q_proj", HIDDEN, HIDDEN), ("attn_k", "self_attn.k_proj", KV_WIDTH, HIDDEN),
    ("attn_v", "self_attn.v_proj", KV_WIDTH, HIDDEN), ("attn_output", "self_attn.o_proj", HIDDEN, HIDDEN),
    ("ffn_gate", "mlp.gate_proj", INTERMEDIATE, HIDDEN), ("ffn_up", "mlp.up_proj", INTERMEDIATE, HIDDEN),
    ("ffn_down", "mlp.down_proj", HIDDEN, INTERMEDIATE),
]
NORMS = [("attn_norm", "input_layernorm"), ("ffn_norm", "post_attention_layernorm")]


def byte_tokens():
    """The characters that stand for the 256 bytes in byte-level vocabularies."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return [chr(byte) for byte in plain] + [chr(256 + i) for i in range(len(others))]


def tokens():
    start = byte_tokens()
    return start + ["ab"] + [f"<{i}>" for i in range(VOCAB - len(start) - 1)]


def noise(np, rows, cols):
    """Rows of one long random row, each from another place on: made in no time."""
    long = np.random.default_rng(rows * cols).standard_normal(1 << 20, dtype=np.float32) / np.sqrt(cols)
    starts = np.arange(rows) * 7919 % (len(long) - cols)
    return np.stack([long[start:start + cols] for start in starts])


def write_f16(path):
    import gguf
    import numpy as np

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens())
    writer.add_token_types([gguf.TokenType.NORMAL] * VOCAB)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(VOCAB - 2)
    writer.add_eos_token_id(VOCAB - 1)
    for name in ("token_embd", "output"):
        writer.add_tensor(f"{name}.weight", noise(np, VOCAB, HIDDEN).astype(np.float16))
    writer.add_tensor("output_norm.weight", np.ones(HIDDEN, dtype=np.float32))
    for layer in range(LAYERS):
        for name, _ in NORMS:
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(HIDDEN, dtype=np.float32))
        for name, _, rows, cols in LINEARS:
            writer.add_tensor(f"blk.{layer}.{name}.weight", noise(np, rows, cols).astype(np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_directory(folder, symmetric):
    import numpy as np
    from safetensors.numpy import save_file

    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    tensors = {name: noise(np, VOCAB, HIDDEN).astype(np.float16) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    tensors["model.norm.weight"] = np.ones(HIDDEN, dtype=np.float16)
    for layer in range(LAYERS):
        for _, name in NORMS:
            tensors[f"model.layers.{layer}.{name}.weight"] = np.ones(HIDDEN, dtype=np.float16)
        for _, name, rows, cols in LINEARS:
            stem = f"model.layers.{layer}.{name}"
            integers = lambda *shape: draw.integers(-2**31, 2**31, shape, dtype=np.int64).astype(np.int32)
            tensors[f"{stem}.weight_packed"] = integers(rows, cols // 8)
            tensors[f"{stem}.weight_scale"] = np.full((rows, cols // GROUP), 0.22 / np.sqrt(cols), dtype=np.float16)
            tensors[f"{stem}.weight_shape"] = np.array([rows, cols], dtype=np.int64)
            if not symmetric:
                tensors[f"{stem}.weight_zero_point"] = integers(rows // 8, cols // GROUP)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP, "symmetric": symmetric, "dynamic": False}
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCAB, "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "hidden_act": "silu", "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "torch_dtype": "float16", "bos_token_id": VOCAB - 2, "eos_token_id": VOCAB - 1,
        "quantization_config": {
            "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}},
        },
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    vocabulary = {token: i for i, token in enumerate(tokens())}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    tokenizer = {"version": "1.0", "added_tokens": [], "normalizer": None, "pre_tokenizer": byte_level, "decoder": byte_level,
                 "post_processor": None, "truncation": None, "padding": None,
                 "model": {"type": "BPE", "vocab": vocabulary, "merges": [["a", "b"]]}}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


def path_of(name):
    return FOLDER / (f"llama-1b-{name}.gguf" if name in GGUF else f"llama-1b-{name}")


def make(names):
    """Makes those that are not there; runs inside the environment that `main` prepares."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    files = [name for name in names if name in GGUF and not path_of(name).exists()]
    if files:
        tools = peer.build_llama_cpp(peer.COMPARISONS["cpu"], [*peer.COMPARISONS["cpu"].targets, "llama-quantize"])
        whole = FOLDER / "llama-1b-f16.gguf"
        peer.say("writing the weights")
        write_f16(whole)
        for name in files:
            peer.say(f"quantising {name}")
            unfinished = path_of(name).with_suffix(".part")
            peer.run([tools / "llama-quantize", whole, unfinished, GGUF[name]], log=FOLDER / "quantize.log")
            unfinished.rename(path_of(name))
        whole.unlink()
    for name in names:
        if name in DIRECTORIES and not path_of(name).exists():
            peer.say(f"writing {name}")
            write_directory(path_of(name), DIRECTORIES[name])


def main():
    names = sys.argv[1:] or [*GGUF, *DIRECTORIES]
    unknown = [name for name in names if name not in GGUF and name not in DIRECTORIES]
    if unknown:
        sys.exit(f"synthetic: no model {', '.join(unknown)}; there are {', '.join([*GGUF, *DIRECTORIES])}")
    try:
        import gguf  # noqa: F401
        import safetensors  # noqa: F401
    except ImportError:
        venv = FOLDER / "venv"
        if not (venv / "installed").exists():
            peer.run([sys.executable, "-m", "venv", venv])
            peer.run([venv / "bin" / "pip", "install", "-q", *PACKAGES])
            (venv / "installed").touch()
        sys.exit(subprocess.run([venv / "bin" / "python", __file__, *names]).returncode)
    try:
        make(names)
    except peer.BenchError as error:
        sys.exit(f"synthetic: {error}")


if __name__ == "__main__":
    main()
