// The C ABI of the decoder. decoder.py mirrors it.

#include "draft.h"

namespace {

// ---- Operations by themselves ----

template <class T>
void linear_alone(const T* x, const PacelineMatrix& matrix, int64_t rows, int64_t num_threads, float* out) {
    static thread_local Zeroed<Activation<T>> memory;
    static thread_local Quantized room;
    const Tiled<Activation<T>> tiled = activations<T>(memory, rows, matrix.inputs);
    room.reserve(rows, matrix.inputs, num_threads);
    const Quantized& shared = room;
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t i = 0; i < tiled.size; ++i) {
            convert(i < matrix.inputs ? x[row * matrix.inputs + i] : T{}, *tiled.at(row, i));
        }
    }
    Team team(num_threads);
#pragma omp parallel num_threads(num_threads)
    project<T>(team, matrix, tiled, rows, shared, RowMajor{out, matrix.outputs});
}

template <class T>
void store_kv_alone(const T* key, const T* value, const PacelineBatch& batch, const Pages& pages) {
    const int64_t size = pages.num_kv_heads * pages.head_dim;
    T* const keys = (T*)batch.kv;
    for (int64_t i = 0; i < batch.num_seqs; ++i) {
        for (int64_t row = batch.query_starts[i]; row < batch.query_starts[i + 1]; ++row) {
            const int64_t position = batch.context_lens[i] - (batch.query_starts[i + 1] - row);
            const int64_t block = batch.block_tables[i * batch.max_blocks + position / pages.block_size];
            for (int64_t head = 0; head < pages.num_kv_heads; ++head) {
                const int64_t from = row * size + head * pages.head_dim;
                pages.write(keys, keys + batch.kv_elements, block, position % pages.block_size, head, key + from,
                            value + from);
            }
        }
    }
}

template <class T>
void attention_alone(const T* query, const PacelineBatch& from, const Pages& pages, int64_t num_heads, float scale,
                     T* out) {
    const Batch batch = {from.num_seqs, from.max_blocks, from.query_starts, from.context_lens, from.block_tables};
    const int64_t rows = batch.query_starts[batch.num_seqs], size = num_heads * pages.head_dim;
    static thread_local Zeroed<Activation<T>> memory;
    const Tiled<Activation<T>> tiled = activations<T>(memory, rows, size);
    const Attention<T> attention(batch, pages, num_heads, scale, from.num_threads);
    const T* const keys = (const T*)from.kv;
    Team team(from.num_threads);
#pragma omp parallel num_threads(from.num_threads)
    attention(team, tiled, query, keys, keys + from.kv_elements);
    constexpr int64_t TOGETHER = PIECE<Activation<T>>;
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t i = 0; i < size; i += TOGETHER) {
            const Activation<T>* const piece = tiled.at(row, i);
            for (int64_t j = 0; j < std::min(TOGETHER, size - i); ++j) convert(piece[j], out[row * size + i + j]);
        }
    }
}

// ---- Types, which C does not have ----

// Calls act with a zero of the type that is multiplied.
template <class Act>
auto with_type(bool bf16, const Act& act) {
    return bf16 ? act(bfloat16{}) : act(0.0f);
}

template <class T>
Decoder<T>& known(void* decoder) {
    return *(Decoder<T>*)decoder;
}

}  // namespace

// Weights are of kind 0, float, 1, bfloat16, or 2, 8 bits; activations are bfloat16 if `bf16`, else float.
extern "C" {

int64_t paceline_packed_bytes(int kind, int64_t outputs, int64_t inputs) {
    const int64_t tiles = ceil_div(outputs, TILE);
    if (kind == 0) return tiles * Packed<float>::tile_elements(inputs) * 4;
    if (kind == 1) return tiles * Packed<bfloat16>::tile_elements(inputs) * 2;
    return tiles * Packed8::tile_elements(inputs);
}

// Rows [outputs, inputs] of a checkpoint, to lie from output `first` on.
void paceline_pack(int kind, bool bf16, void* packed, float* scales, const void* rows, int64_t outputs, int64_t inputs,
                   int64_t first, int64_t apart) {
    const WeightRows<float> floats = {(const float*)rows, outputs, inputs, first, apart};
    const WeightRows<bfloat16> halves = {(const bfloat16*)rows, outputs, inputs, first, apart};
    if (kind == 0) pack((float*)packed, floats);
    if (kind == 1) pack((bfloat16*)packed, halves);
    if (kind == 2 && bf16) pack8((uint8_t*)packed, scales, halves);
    if (kind == 2 && !bf16) pack8((uint8_t*)packed, scales, floats);
}

void* paceline_new(bool bf16, const PacelineModel* model) {
    return with_type(bf16, [&](auto zero) -> void* { return new Decoder<decltype(zero)>(*model); });
}

void paceline_delete(bool bf16, void* decoder) {
    with_type(bf16, [&](auto zero) { delete &known<decltype(zero)>(decoder); });
}

void paceline_forward(bool bf16, void* decoder, const PacelineBatch* batch, void* hidden) {
    with_type(bf16, [&](auto zero) {
        using T = decltype(zero);
        known<T>(decoder).forward(*batch, (T*)hidden);
    });
}

void paceline_logits_of(bool bf16, void* decoder, const PacelineBatch* batch, const int64_t* wanted, int64_t count,
                        float* out) {
    with_type(bf16, [&](auto zero) { known<decltype(zero)>(decoder).logits_of(*batch, wanted, count, out); });
}

void paceline_logits(bool bf16, void* decoder, const void* hidden, int64_t rows, int64_t num_threads, float* out) {
    with_type(bf16, [&](auto zero) {
        using T = decltype(zero);
        known<T>(decoder).logits((const T*)hidden, rows, num_threads, out);
    });
}

void paceline_draft(bool bf16, void* decoder, const PacelineBatch* batch, const int32_t* depths, int64_t max_depth,
                    const PacelineChoices* choices, int64_t* out) {
    with_type(bf16, [&](auto zero) {
        using T = decltype(zero);
        Drafting<T>(known<T>(decoder), *batch).run(depths, max_depth, *choices, out);
    });
}

// Operations by themselves.

// x [rows, inputs] times a matrix, plus its bias -> out [rows, outputs].
void paceline_linear(bool bf16, const void* x, const PacelineMatrix* matrix, int64_t rows, int64_t num_threads,
                     float* out) {
    with_type(bf16, [&](auto zero) { linear_alone((const decltype(zero)*)x, *matrix, rows, num_threads, out); });
}

// key and value [rows, num_kv_heads, head_dim] to the pages of a layer.
void paceline_store_kv(bool bf16, const void* key, const void* value, const PacelineBatch* batch, int64_t num_kv_heads,
                       int64_t head_dim) {
    const Pages pages = {batch->block_size, num_kv_heads, head_dim};
    with_type(bf16, [&](auto zero) {
        using T = decltype(zero);
        store_kv_alone((const T*)key, (const T*)value, *batch, pages);
    });
}

// query [rows, num_heads, head_dim] over the pages of a layer -> out, likewise.
void paceline_paged_attention(bool bf16, const void* query, const PacelineBatch* batch, int64_t num_heads,
                              int64_t num_kv_heads, int64_t head_dim, float scale, void* out) {
    const Pages pages = {batch->block_size, num_kv_heads, head_dim};
    with_type(bf16, [&](auto zero) {
        using T = decltype(zero);
        attention_alone((const T*)query, *batch, pages, num_heads, scale, (T*)out);
    });
}
}
