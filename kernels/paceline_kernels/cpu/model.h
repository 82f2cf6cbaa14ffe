// What Python and C++ tell each other about a decoder.
#pragma once

#include <cstdint>

// Mirrored in decoder.py. Vectors are float32; matrices are packed, T or 8 bits with scales.
extern "C" {

struct PacelineMatrix {
    const void* data;
    const float* scales;  // [outputs], of 8-bit weights only
    const float* bias;    // [outputs] or null. Scales and bias are padded to tiles.
    int64_t outputs, inputs;
    int64_t streamed;  // whether it is gone from every cache before it is read again
};

struct PacelineLayer {
    const float *input_norm, *post_norm;  // [hidden]
    const float *q_norm, *k_norm;         // [head_dim] or null
    PacelineMatrix qkv, output;
    PacelineMatrix gate_up;  // gate and up take turns, tile by tile
    PacelineMatrix down;
};

struct PacelineModel {
    int64_t hidden, intermediate, num_layers, num_heads, num_kv_heads, head_dim, vocab;
    float eps;
    const PacelineLayer* layers;
    const float* norm;        // [hidden]
    const float *cos, *sin;   // [max_positions, head_dim / 2]
    const void* embedding;    // [vocab, hidden] of T as it stands; null if the head is the embedding too
    PacelineMatrix head;
};

struct PacelineBatch {
    int64_t num_seqs, max_blocks, block_size;
    const int64_t* token_ids;
    const int32_t *query_starts, *context_lens, *block_tables;
    void* kv;             // the pages: keys of a layer, then its values
    int64_t kv_elements;  // of the keys of one layer
    int64_t num_threads;
};

// How the drafts of each sequence are chosen; arrays of [num_seqs] unless said otherwise.
struct PacelineChoices {
    const int32_t* kinds;      // the most probable, by the noise of a key, or drawn
    const float* temperatures;
    const int64_t* top_k;
    const float *top_p, *min_p, *typical_p;
    const int64_t* keys;       // [num_seqs, 4]: of the first draft's noise; the position is the third
    const double* uniforms;    // [num_seqs, max_depth]: what draws go by
    const int64_t* first_rows;
    float* probs;              // [rows, vocab]: what the drafts of i are drawn from, from first_rows[i] on
};
}
