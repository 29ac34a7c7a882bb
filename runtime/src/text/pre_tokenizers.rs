//! What the names in `tokenizer.ggml.pre` mean: how text is split before it is merged.
//!
//! Invariant: a row has what the tokenizer.json of such models has; where llama.cpp approximates that, its ids differ
//! (`tests/fixtures/README.md`). A name that is not here is refused. Read by `gguf_vocab`.

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str =
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Mistral's own pattern. llama.cpp approximates its character classes, so its ids differ at a change of case outside
/// ASCII and at combining marks; the model was trained with these.
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// That of o200k: words by case with their contraction. Approximated by llama.cpp as `TEKKEN` is.
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
/// Letters with case of Unicode 11, less Armenian's small ones, as DeepSeek's first pattern lists them.
const DEEPSEEK_WORD: &str = r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-ώᾀ-ᾴᾶ-ᾼιῂ-ῄῆ-ῌῐ-ΐῖ-Ίῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤΩℨK-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+";
const DEEPSEEK_MARKS: &str = r"\s?[!-/:-~！-／：-～‘-‟　-。]+";
const DEEPSEEK_HAN: &str = r"[一-龥ࠀ-一가-퟿]+";
const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;

/// What a pre-tokenizer name means.
pub(super) struct PreTokenizer {
    pub(super) names: &'static [&'static str],
    /// Splits, one after another, each inside the pieces of the one before.
    pub(super) splits: &'static [&'static str],
    /// A piece that is a token whole is taken whole, whatever the merges say.
    pub(super) ignore_merges: bool,
    /// Whether BOS is added where `tokenizer.ggml.add_bos_token` does not say.
    pub(super) add_bos: bool,
    /// The official tokenizer composes characters first (llama.cpp does not).
    pub(super) nfc: bool,
}

const PLAIN: PreTokenizer = PreTokenizer { names: &[], splits: &[], ignore_merges: false, add_bos: false, nfc: false };

/// Names as llama.cpp's converter writes them: it tells tokenizers apart by what they make of a text, so that Phi-4 is `dbrx`
/// and gpt-oss `gpt-4o`.
pub(super) const PRE_TOKENIZERS: &[PreTokenizer] = &[
    PreTokenizer { names: &["gpt-2"], splits: &[GPT2], ..PLAIN },
    PreTokenizer { names: &["smollm"], splits: &[r"\p{N}", GPT2], ..PLAIN },
    PreTokenizer {
        names: &["llama-bpe", "llama3", "llama-v3"],
        splits: &[LLAMA3],
        ignore_merges: true,
        add_bos: true,
        ..PLAIN
    },
    PreTokenizer { names: &["dbrx", "smaug-bpe"], splits: &[LLAMA3], ..PLAIN },
    PreTokenizer { names: &["qwen2"], splits: &[QWEN2], nfc: true, ..PLAIN },
    PreTokenizer { names: &["deepseek-r1-qwen"], splits: &[QWEN2], ..PLAIN },
    PreTokenizer { names: &["tekken"], splits: &[TEKKEN], ignore_merges: true, add_bos: true, ..PLAIN },
    PreTokenizer { names: &["gpt-4o"], splits: &[GPT4O], ..PLAIN },
    PreTokenizer {
        names: &["deepseek-llm"],
        splits: &[r"[\r\n]", DEEPSEEK_WORD, DEEPSEEK_MARKS, r"\s+$", DEEPSEEK_HAN, r"\p{N}"],
        ..PLAIN
    },
    PreTokenizer {
        names: &["deepseek-coder"],
        splits: &[r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", DEEPSEEK_HAN, r"\p{N}"],
        ..PLAIN
    },
    PreTokenizer {
        names: &["deepseek-v3"], splits: &[r"\p{N}{1,3}", r"[一-龥\u{3040}-ゟ゠-ヿ]+", DEEPSEEK3], ..PLAIN
    },
    PreTokenizer {
        names: &["default"],
        splits: &[r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"],
        ..PLAIN
    },
];
