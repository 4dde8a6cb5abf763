// What crosses the C boundary: plain structs, mirrored field by field in library.py. All memory stays the caller's.
#pragma once

#include <cstdint>

extern "C" {

// How the numbers of a weight matrix, of embeddings or of the KV pool are stored. kWideBFloat16: of adapters, whose products are in
// float32.
enum PdmeshFormat : int32_t { kFloat32 = 0, kBFloat16 = 1, kInt8 = 2, kInt4 = 3, kWideBFloat16 = 4 };

// y = W x + b. `packed`: panels of 16 outputs (pdmesh/engine/loader/pack.py draws the layout); `scales`: a factor for each output
// (int8 only), `bias`: or null; both padded with zeros to a multiple of 16.
struct PdmeshLinear {
    int32_t format, n, k, group;
    const uint8_t* packed;
    const float* scales;
    const float* bias;
};

// Divides rows by their root mean square (kRootMeanSquare), or takes their mean off and divides by their deviation (kLayerNorm),
// times `weight`, plus `bias` (or null). Both are padded with zeros to a multiple of 16. `weight` null: no norm.
enum PdmeshNormKind : int32_t { kRootMeanSquare = 0, kLayerNorm = 1 };
struct PdmeshNorm {
    const float *weight, *bias;
    float eps;
    int32_t kind;
};

// Which weights norms of queries and keys have: one vector [head_dim] for all heads, one for each head, or one over all heads, which
// are normalized together.
enum PdmeshHeadNorms : int32_t { kOneForAllHeads = 0, kOneForEachHead = 1, kOverAllHeads = 2 };

// kClampedSwish: GPT-OSS's, of gate and up.
enum PdmeshActivation : int32_t { kSilu = 0, kGelu = 1, kGeluTanh = 2, kRelu = 3, kSquaredRelu = 4, kClampedSwish = 5 };

struct PdmeshRope {
    const float *cos, *sin;  // [max_context][dim / 2]
    int64_t dim;
};

// kSoftmaxOfBest, kSigmoidOfBest: of the logits of those chosen. kSparseMixer: Phi-3.5-MoE's.
enum PdmeshScoring : int32_t { kSoftmax = 0, kSigmoid = 1, kSoftmaxOfBest = 2, kSparseMixer = 3, kSigmoidOfBest = 4 };

struct PdmeshExpert {
    PdmeshLinear gate_up, down;
};

// See ExpertsConfig (pdmesh/engine/models/config.py). `router` is float32; behind the experts' rows it has the shared expert's gate, if
// there is one. `correction` [num_experts] or null; `shared` or null; `counts` [num_experts] adds up the tokens of each expert.
struct PdmeshExperts {
    int32_t num_experts, top_k, scoring, normalizes, num_groups, top_groups, ranks_by_two, activation;
    float scale, jitter, limit;
    int32_t has_shared_gate, scales_input;
    PdmeshLinear router;
    const float* correction;
    const PdmeshExpert* experts;
    const PdmeshExpert* shared;
    int64_t* counts;
};

// Latent attention, behind a first product that gives the query's bottleneck (or without one, all queries), then the latent and its
// rotated key. `queries`: of the bottleneck; n 0: none. `key_maps`, `value_maps` [num_heads]: from a head's query without rotation to
// the latent, from the latent to the head's values.
struct PdmeshLatent {
    int32_t kv_rank, nope_dim, rope_dim, value_dim;
    PdmeshNorm query_norm, latent_norm;
    PdmeshLinear queries;
    const PdmeshLinear *key_maps, *value_maps;
};

// `query_norm`, `key_norm`: see PdmeshHeadNorms. `window` 0: none; below 0: chunks of so many tokens. `rope`: which of the model's, -1: none. A gated MLP's gate_up map
// has alternating panels: 16 gate outputs, their 16 up outputs, and so on; a plain one's is its first map.
struct PdmeshLayer {
    PdmeshNorm input_norm, mlp_norm, post_attention_norm, post_mlp_norm, query_norm, key_norm;
    PdmeshLinear qkv, output, gate_up, down;
    const float* sinks;            // [num_heads] or null
    const float* temperatures;     // [max_context]: factors of queries by their position; or null
    const PdmeshExperts* experts;  // instead of gate_up and down; or null
    const PdmeshLatent* latent;    // of all layers or none
    int64_t window, rope;
};

// `num_kv_heads`, `head_dim`: of the pool, whose keys and values are halves of a latent where attention is latent.
struct PdmeshModel {
    int32_t num_layers, hidden, intermediate, num_heads, num_kv_heads, head_dim, vocab, max_context;
    int32_t block_size, kv_format, embedding_format;
    int32_t head_norms, norms_rotated;            // the latter: heads are normalized behind their rotation
    int32_t activation, is_gated, is_parallel;    // parallel: attention and MLP read the same states
    float attention_scale, attention_softcap;     // softcap 0: none
    float embedding_multiplier, residual_multiplier, logits_multiplier, logits_softcap;
    const PdmeshLayer* layers;
    PdmeshNorm embedding_norm, norm;
    PdmeshLinear head;
    const uint8_t* embedding;  // [vocab][hidden], rows without padding
    const float* positions;    // [max_context][hidden], added to the embeddings; or null
    PdmeshRope ropes[2];
};

// What a LoRA adapter adds to one of a layer's products: B A x. `down`: A, of all its parts; n 0: it adds nothing. A part is a map of
// the checkpoint's: `up` is B with the adapter's factor; it reads the numbers of A x from `column` on, and its panels belong to the
// product's panels first, first + step, and so on. Both are kFloat32 or kWideBFloat16.
struct PdmeshAdapterPart {
    PdmeshLinear up;
    int32_t column, first, step;
};
struct PdmeshAdapterMap {
    PdmeshLinear down;
    const PdmeshAdapterPart* parts;
    int64_t num_parts;
};

// A layer's products that adapters may add to. An adapter has a map for each of them, layer by layer.
enum PdmeshAdapted : int32_t { kQkv = 0, kOutput = 1, kGateUp = 2, kDown = 3 };
constexpr int kAdaptedProducts = 4;

// A KV pool by itself.
struct PdmeshPool {
    int32_t num_layers, block_size, num_kv_heads, head_dim, format;
    int64_t num_blocks;
    uint8_t* kv;
};

// Nanoseconds of each stage of one step, as rank 0 saw them; the waiting at a stage's end is part of the stage.
struct PdmeshProfile {
    int64_t embed, prepare, qkv, rope, attention, output, gate_up, down, head, total;
};

struct PdmeshStep {
    int32_t num_tokens, num_seqs, num_rows;
    const int64_t *token_ids, *positions, *slots;  // [num_tokens]
    const int32_t *query_starts;                   // [num_seqs + 1]
    const int32_t *context_lens;                   // [num_seqs]
    const int32_t *blocks;                         // block ids of all sequences, one after the other
    const int32_t *block_starts;                   // [num_seqs]: where each sequence's begin
    const int64_t *logits_rows;                    // [num_rows]: tokens whose logits are wanted
    uint8_t* kv;                                   // the pool
    int64_t num_blocks;
    float* logits;                                 // [num_rows][vocab]
    float* hidden;                                 // or null: [num_rows][hidden], those tokens' last states, before the final norm
    PdmeshProfile* profile;                        // or null
    int32_t* layers_done;                          // or null: counts the layers whose KV is in the pool
    int32_t signal_fd, signal_every;               // beside it: a byte is written there each so many layers, unless negative
    // Sequences whose last keys lie elsewhere than their blocks say (pdmesh/engine/runner/batch.py, Tail), ascending. For each its index, the
    // position from which on they do, and where in `tail_slots` the slots of that and the following positions begin.
    const int32_t (*tails)[3];
    const int64_t* tail_slots;
    int64_t num_tails;
    const int32_t* adapter_slots;              // or null: no sequence has an adapter; [num_seqs]: which of `adapters`, -1: none
    const PdmeshAdapterMap* const* adapters;  // each [num_layers][kAdaptedProducts]
};

}
