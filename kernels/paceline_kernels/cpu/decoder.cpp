// A decoder-only transformer over paged KV, all of its layers in one call.
//
// Every thread of a team walks through the layers together with the others: an operation is a loop that they share, and
// ends with a barrier. The residual stream and all sums are float32; what is multiplied is T, float or bfloat16,
// rounded once. Whatever an operation computes for a row follows from that row alone.

#include <omp.h>

#include <vector>

#include "attention.h"
#include "pack.h"

// Mirrored in decoder.py. Vectors are float32; matrices are packed, T or 8 bits with scales.
extern "C" {

struct PacelineMatrix {
    const void* data;
    const float* scales;  // [outputs], of 8-bit weights only
    const float* bias;    // [outputs] or null. Scales and bias are padded to tiles.
    int64_t outputs, inputs;
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
}

namespace {

// Memory that begins as zeros, and whose padding therefore stays so as long as nobody writes there.
template <class T>
class Zeroed {
public:
    T* get(int64_t elements) {
        if (elements > size_) {
            size_ = elements;
            data_ = scratch_.get<T>(elements);
            std::memset((void*)data_, 0, elements * sizeof(T));
        }
        return data_;
    }

private:
    Scratch scratch_;
    T* data_ = nullptr;
    int64_t size_ = 0;
};

// ---- Products with any kind of matrix ----

// To the nearest integer, of magnitude below 2^22: adding 1.5 * 2^23 leaves it in the low bits.
    inline Ints rounded(Floats x) { return (Ints)(x + 0x1.8p23f) - 0x4b400000; }

// Rows of x in 8 bits. Shared by the team.
        template <class T>
void quantize(const Tiled<T>& x, int64_t rows, const Packed8::Input& to) {
#pragma omp for
        for (int64_t row = 0; row < rows; ++row) {
            for (int64_t group = 0; group < to.groups(); ++group) {
                Floats part[GROUP / LANES] = {};
                Floats largest = {};
                for (int64_t i = 0; i < GROUP && group * GROUP + i < x.size; i += LANES) {
                    Floats& some = part[i / LANES];
                    some = load(x.at(row, group * GROUP + i));
                    const Floats magnitude = some < 0.0f ? -some : some;
                    largest = magnitude > largest ? magnitude : largest;
                }
                const float scale = maximum(largest) / 127;
                const Floats inverse = all(scale > 0 ? 1 / scale : 0);
                Ints sum = {};
                int8_t* const values = to.values.at(row, group * GROUP);
                for (int64_t i = 0; i < GROUP; i += LANES) {
                    const Ints nearest = rounded(part[i / LANES] * inverse);
                    sum += nearest;
                    for (int lane = 0; lane < LANES; ++lane) {
                        values[i / 64 * LANES * 64 + i % 64 + lane] = (int8_t)nearest[lane];
                    }
                }
                int32_t total = 0;
                for (int lane = 0; lane < LANES; ++lane) total += sum[lane];
                to.scales[to.index(row, group)] = scale;
                to.corrections[to.index(row, group)] = -OFFSET * total;
            }
        }
    }

// Room for activations of 8 bits.
class Quantized {
public:
    void reserve(int64_t rows, int64_t inputs) {
        const int64_t elements = round_up(rows, LANES) * Packed8::padded(inputs);
        values_ = value_memory_.get(elements);
        scales_ = scale_memory_.get(elements / GROUP);
        corrections_ = correction_memory_.get(elements / GROUP);
    }

    Packed8::Input of(int64_t inputs) const { return {{values_, Packed8::padded(inputs)}, scales_, corrections_}; }

private:
    Zeroed<int8_t> value_memory_;
    Zeroed<float> scale_memory_;
    Zeroed<int32_t> correction_memory_;
    int8_t* values_ = nullptr;
    float* scales_ = nullptr;
    int32_t* corrections_ = nullptr;
};

inline Packed8 packed8(const PacelineMatrix& matrix) {
    return {(const uint8_t*)matrix.data, matrix.outputs, matrix.inputs, matrix.scales};
}

template <class T>
Packed<T> packed(const PacelineMatrix& matrix) {
    return {(const T*)matrix.data, matrix.outputs, matrix.inputs};
}

// `linear` by the kind of weights that the matrix holds.
template <int TOGETHER, class T, class Use>
void multiply_by(const PacelineMatrix& matrix, const Tiled<T>& x, int64_t rows, const Quantized& room, const Use& use) {
    if (!matrix.scales) return linear<TOGETHER>(x, packed<T>(matrix), rows, use);
    const Packed8::Input quantized = room.of(matrix.inputs);
    quantize(x, rows, quantized);
    linear<TOGETHER>(quantized, packed8(matrix), rows, use);
}

inline Floats with_bias(const float* sums, const PacelineMatrix& matrix, int64_t output) {
    return matrix.bias ? load(sums) + load(matrix.bias + output) : load(sums);
}

// x times a matrix, plus its bias -> out [rows, outputs]. Shared by the team.
template <class T>
void project(const PacelineMatrix& matrix, const Tiled<T>& x, int64_t rows, const Quantized& room, float* out) {
    multiply_by<1>(matrix, x, rows, room, [&](int64_t output, int64_t row, const float* const* sums) {
        for (int64_t i = 0; i < TILE; i += LANES) {
            const int64_t count = matrix.outputs - output - i;
            if (count <= 0) return;
            store_some(out + row * matrix.outputs + output + i, with_bias(sums[0] + i, matrix, output + i), count);
        }
    });
}

template <class T>
class Decoder {
public:
    explicit Decoder(const PacelineModel& model) : model_(model) {}

    // Hidden states after the final norm -> out [rows, hidden].
    void forward(const PacelineBatch& from, T* out) {
        const Batch batch = {from.num_seqs, from.max_blocks, from.query_starts, from.context_lens, from.block_tables};
        const Pages pages = {from.block_size, model_.num_kv_heads, model_.head_dim};
        const int64_t rows = batch.query_starts[batch.num_seqs];
        const Attention<T> attention(batch, pages, model_.num_heads, 1 / std::sqrt((float)model_.head_dim));
        locate(batch);
        reserve(rows);
        T* const kv = (T*)from.kv;
#pragma omp parallel num_threads(from.num_threads)
        {
            embed(from.token_ids, rows);
            for (int64_t index = 0; index < model_.num_layers; ++index) {
                const PacelineLayer& layer = model_.layers[index];
                T* const keys = kv + 2 * index * from.kv_elements;
                T* const values = keys + from.kv_elements;
                normalize(layer.input_norm, rows);
                project(layer.qkv, normed_, rows, room_, qkv_);
                place(layer, batch, pages, rows, keys, values);
                attention(attended_, query_, keys, values);
                add(attended_, rows, layer.output);
                normalize(layer.post_norm, rows);
                gate(rows, layer.gate_up);
                add(gated_, rows, layer.down);
            }
            finish(rows, out);
        }
    }

    // Rows of hidden states [rows, hidden] -> out [rows, vocab].
    void logits(const T* hidden, int64_t rows, int64_t num_threads, float* out) {
        reserve(rows);
#pragma omp parallel num_threads(num_threads)
        {
#pragma omp for
            for (int64_t row = 0; row < rows; ++row) {
                for (int64_t i = 0; i < model_.hidden; ++i) *normed_.at(row, i) = hidden[row * model_.hidden + i];
            }
            project(model_.head, normed_, rows, room_, out);
        }
    }

    // Greedy continuations: runs are the rows of each sequence that are not computed yet; then each sequence i goes on by
    // its own drafts until it has depths[i] of them -> out [num_seqs, max_depth].
    void draft(const PacelineBatch& from, const int32_t* depths, int64_t max_depth, int64_t* out) {
        const int64_t rows = from.query_starts[from.num_seqs];
        draft_hidden_.resize(std::max<int64_t>(rows, 1) * model_.hidden);
        forward(from, draft_hidden_.data());
        std::vector<int64_t> going, ends;
        for (int64_t i = 0; i < from.num_seqs; ++i) {
            if (depths[i] > 0) {
                going.push_back(i);
                ends.push_back(from.query_starts[i + 1] - 1);
            }
        }
        std::vector<int32_t> starts, contexts, tables;
        std::vector<int64_t> token_ids;
        for (int64_t pass = 0; !going.empty(); ++pass) {
            choose(ends, from.num_threads);
            starts.assign(1, 0);
            contexts.clear();
            tables.clear();
            token_ids.clear();
            std::vector<int64_t> left;
            for (size_t i = 0; i < going.size(); ++i) {
                const int64_t seq = going[i];
                out[seq * max_depth + pass] = chosen_[i];
                if (depths[seq] <= pass + 1) continue;
                left.push_back(seq);
                starts.push_back((int32_t)left.size());
                contexts.push_back(from.context_lens[seq] + (int32_t)pass + 1);
                token_ids.push_back(chosen_[i]);
                tables.insert(tables.end(), from.block_tables + seq * from.max_blocks,
                              from.block_tables + (seq + 1) * from.max_blocks);
            }
            going = left;
            if (going.empty()) return;
            PacelineBatch next = from;
            next.num_seqs = (int64_t)going.size();
            next.token_ids = token_ids.data();
            next.query_starts = starts.data();
            next.context_lens = contexts.data();
            next.block_tables = tables.data();
            forward(next, draft_hidden_.data());
            ends.resize(going.size());
            for (size_t i = 0; i < ends.size(); ++i) ends[i] = (int64_t)i;
        }
    }

private:
    // -- before the layers --

    // Position and page of every row.
    void locate(const Batch& batch) {
        positions_.clear();
        sequences_.clear();
        for (int64_t i = 0; i < batch.num_seqs; ++i) {
            const int64_t count = batch.query_starts[i + 1] - batch.query_starts[i];
            for (int64_t j = 0; j < count; ++j) {
                positions_.push_back(batch.context_lens[i] - count + j);
                sequences_.push_back(i);
            }
        }
    }

    void reserve(int64_t rows) {
        const int64_t heads = model_.num_heads * model_.head_dim;
        residual_ = residual_memory_.get(rows * model_.hidden);
        qkv_ = qkv_memory_.get(rows * (heads + 2 * model_.num_kv_heads * model_.head_dim));
        query_ = query_memory_.get(rows * heads);
        placed_ = placed_memory_.get(rows * 2 * model_.num_kv_heads * model_.head_dim);
        normed_ = tiled(normed_memory_, rows, model_.hidden);
        attended_ = tiled(attended_memory_, rows, heads);
        gated_ = tiled(gated_memory_, rows, model_.intermediate);
        room_.reserve(rows, std::max({model_.hidden, heads, model_.intermediate}));
    }

    static Tiled<T> tiled(Zeroed<T>& memory, int64_t rows, int64_t size) {
        return {memory.get(Tiled<T>::elements(rows, size)), Tiled<T>::padded(size)};
    }

    void embed(const int64_t* token_ids, int64_t rows) {
        const PacelineMatrix& head = model_.head;
#pragma omp for
        for (int64_t row = 0; row < rows; ++row) {
            float* const to = residual_ + row * model_.hidden;
            const int64_t token = token_ids[row];
            if (model_.embedding) {
                const T* const from = (const T*)model_.embedding + token * model_.hidden;
                for (int64_t i = 0; i < model_.hidden; ++i) to[i] = to_float(from[i]);
            } else if (head.scales) {
                const Packed8 weights = packed8(head);
                for (int64_t i = 0; i < model_.hidden; ++i) to[i] = weight(weights, token, i);
            } else {
                const Packed<T> weights = packed<T>(head);
                for (int64_t i = 0; i < model_.hidden; ++i) to[i] = weight(weights, token, i);
            }
        }
    }

    // -- operations of a layer, shared by the team --

    // normed_ = the norm of residual_
    void normalize(const float* weight, int64_t rows) {
#pragma omp for
        for (int64_t row = 0; row < rows; ++row) {
            const float* const from = residual_ + row * model_.hidden;
            const float scale = root_mean_square_inverse(from, model_.hidden);
            for (int64_t i = 0; i < model_.hidden; i += LANES) {
                const int64_t count = model_.hidden - i;
                store_some(normed_.at(row, i), load_some(from + i, count) * scale * load_some(weight + i, count), count);
            }
        }
    }

    // residual_ += x * matrix
    void add(const Tiled<T>& x, int64_t rows, const PacelineMatrix& matrix) {
        multiply_by<1>(matrix, x, rows, room_, [&](int64_t output, int64_t row, const float* const* sums) {
            float* const to = residual_ + row * model_.hidden + output;
            for (int64_t i = 0; i < TILE; i += LANES) {
                const int64_t count = matrix.outputs - output - i;
                if (count <= 0) return;
                store_some(to + i, load_some(to + i, count) + with_bias(sums[0] + i, matrix, output + i), count);
            }
        });
    }

    // gated_ = silu(gate) * up of normed_
    void gate(int64_t rows, const PacelineMatrix& matrix) {
        multiply_by<2>(matrix, normed_, rows, room_, [&](int64_t output, int64_t row, const float* const* sums) {
            for (int64_t i = 0; i < TILE; i += LANES) {
                const Floats gate = with_bias(sums[0] + i, matrix, output + i);
                const Floats up = with_bias(sums[1] + i, matrix, output + TILE + i);
                const int64_t column = output / 2 + i, count = model_.intermediate - column;
                if (count <= 0) return;
                store_some(gated_.at(row, column), silu(gate) * up, count);
            }
        });
    }

    // Norm and rotation of queries and keys; queries go to query_, keys and values to their pages.
    void place(const PacelineLayer& layer, const Batch& batch, const Pages& pages, int64_t rows, T* keys, T* values) {
        const int64_t heads = model_.num_heads, kv_heads = model_.num_kv_heads, size = model_.head_dim;
#pragma omp for
        for (int64_t row = 0; row < rows; ++row) {
            float* from = qkv_ + row * (heads + 2 * kv_heads) * size;
            T* const query = query_ + row * heads * size;
            T* const key = placed_ + row * 2 * kv_heads * size;
            T* const value = key + kv_heads * size;
            const int64_t position = positions_[row];
            for (int64_t head = 0; head < heads; ++head, from += size) {
                rotate(from, layer.q_norm, position, query + head * size);
            }
            for (int64_t head = 0; head < kv_heads; ++head, from += size) {
                rotate(from, layer.k_norm, position, key + head * size);
            }
            const int64_t count = kv_heads * size;
            for (int64_t i = 0; i < count; i += LANES) store_some(value + i, load_some(from + i, count - i), count - i);
            const int64_t block = batch.block_tables[sequences_[row] * batch.max_blocks + position / pages.block_size];
            for (int64_t head = 0; head < kv_heads; ++head) {
                pages.write(keys, values, block, position % pages.block_size, head, key + head * size,
                            value + head * size);
            }
        }
    }

    // One head, which is normalized in place first, if it is to be.
    void rotate(float* x, const float* norm, int64_t position, T* out) const {
        const int64_t half = model_.head_dim / 2;
        if (norm) normalize(x, norm, model_.head_dim, x);
        const float *cos = model_.cos + position * half, *sin = model_.sin + position * half;
        for (int64_t i = 0; i < half; i += LANES) {
            const int64_t count = half - i;
            const Floats low = load_some(x + i, count), high = load_some(x + half + i, count);
            const Floats c = load_some(cos + i, count), s = load_some(sin + i, count);
            store_some(out + i, low * c - high * s, count);
            store_some(out + half + i, high * c + low * s, count);
        }
    }

    void finish(int64_t rows, T* out) {
#pragma omp for
        for (int64_t row = 0; row < rows; ++row) {
            normalize(residual_ + row * model_.hidden, model_.norm, model_.hidden, out + row * model_.hidden);
        }
    }

    // -- after the layers --

    // chosen_: the most probable token behind each of the hidden states in draft_hidden_ that `rows` names.
    void choose(const std::vector<int64_t>& rows, int64_t num_threads) {
        const int64_t count = (int64_t)rows.size(), vocab = model_.vocab, hidden = model_.hidden;
        draft_logits_.resize(count * vocab);
        chosen_.resize(count);
        for (int64_t i = 0; i < count; ++i) {  // ascending, so nothing is overwritten before it is read
            std::copy_n(draft_hidden_.data() + rows[i] * hidden, hidden, draft_hidden_.data() + i * hidden);
        }
        logits(draft_hidden_.data(), count, num_threads, draft_logits_.data());
#pragma omp parallel for num_threads(num_threads) if (count * vocab > 1 << 16)
        for (int64_t i = 0; i < count; ++i) {
            const float* const row = draft_logits_.data() + i * vocab;
            chosen_[i] = std::max_element(row, row + vocab) - row;
        }
    }

    // -- pieces --

    template <class To>
    void normalize(const float* x, const float* weight, int64_t size, To* out) const {
        const float scale = root_mean_square_inverse(x, size);
        for (int64_t i = 0; i < size; i += LANES) {
            const int64_t count = size - i;
            store_some(out + i, load_some(x + i, count) * scale * load_some(weight + i, count), count);
        }
    }

    float root_mean_square_inverse(const float* x, int64_t size) const {
        Floats squares = {};
        for (int64_t i = 0; i < size; i += LANES) {
            const Floats part = load_some(x + i, size - i);
            squares = fused(part, part, squares);
        }
        float sum = 0;
        for (int lane = 0; lane < LANES; ++lane) sum += squares[lane];
        return 1 / std::sqrt(sum / size + model_.eps);
    }

    static Floats silu(Floats x) {
        const Floats most = all(88.0f);  // beyond, exp overflows
        return x / (exp(-x > most ? most : -x) + 1.0f);
    }

    const PacelineModel model_;
    std::vector<int64_t> positions_, sequences_;  // of each row
    Zeroed<float> residual_memory_, qkv_memory_;
    Zeroed<T> query_memory_, placed_memory_, normed_memory_, attended_memory_, gated_memory_;
    float *residual_, *qkv_;              // [rows, hidden], [rows, heads of q, k and v]
    T *query_, *placed_;                  // [rows, num_heads, head_dim], [rows, keys then values, head_dim]
    Tiled<T> normed_, attended_, gated_;  // [rows, hidden], [rows, num_heads * head_dim], [rows, intermediate]
    Quantized room_;
    std::vector<T> draft_hidden_;
    std::vector<float> draft_logits_;
    std::vector<int64_t> chosen_;
};

// ---- Operations by themselves ----

template <class T>
void linear_alone(const T* x, const PacelineMatrix& matrix, int64_t rows, int64_t num_threads, float* out) {
    static thread_local Zeroed<T> memory;
    static thread_local Quantized room;
    const Tiled<T> tiled = {memory.get(Tiled<T>::elements(rows, matrix.inputs)), Tiled<T>::padded(matrix.inputs)};
    room.reserve(rows, matrix.inputs);
    const Quantized& shared = room;
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t i = 0; i < tiled.size; ++i) {
            *tiled.at(row, i) = i < matrix.inputs ? x[row * matrix.inputs + i] : T{};
        }
    }
#pragma omp parallel num_threads(num_threads)
    project(matrix, tiled, rows, shared, out);
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
    static thread_local Zeroed<T> memory;
    const Tiled<T> tiled = {memory.get(Tiled<T>::elements(rows, size)), Tiled<T>::padded(size)};
    const Attention<T> attention(batch, pages, num_heads, scale);
    const T* const keys = (const T*)from.kv;
#pragma omp parallel num_threads(from.num_threads)
    attention(tiled, query, keys, keys + from.kv_elements);
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t i = 0; i < size; ++i) out[row * size + i] = *tiled.at(row, i);
    }
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
    const Rows<float> floats = {(const float*)rows, outputs, inputs, first, apart};
    const Rows<bfloat16> halves = {(const bfloat16*)rows, outputs, inputs, first, apart};
    if (kind == 0) pack((float*)packed, floats);
    if (kind == 1) pack((bfloat16*)packed, halves);
    if (kind == 2 && bf16) pack8((uint8_t*)packed, scales, halves);
    if (kind == 2 && !bf16) pack8((uint8_t*)packed, scales, floats);
}

void* paceline_new(bool bf16, const PacelineModel* model) {
    if (bf16) return new Decoder<bfloat16>(*model);
    return new Decoder<float>(*model);
}

void paceline_delete(bool bf16, void* decoder) {
    if (bf16) {
        delete (Decoder<bfloat16>*)decoder;
    } else {
        delete (Decoder<float>*)decoder;
    }
}

void paceline_forward(bool bf16, void* decoder, const PacelineBatch* batch, void* hidden) {
    if (bf16) {
        ((Decoder<bfloat16>*)decoder)->forward(*batch, (bfloat16*)hidden);
    } else {
        ((Decoder<float>*)decoder)->forward(*batch, (float*)hidden);
    }
}

void paceline_logits(bool bf16, void* decoder, const void* hidden, int64_t rows, int64_t num_threads, float* out) {
    if (bf16) {
        ((Decoder<bfloat16>*)decoder)->logits((const bfloat16*)hidden, rows, num_threads, out);
    } else {
        ((Decoder<float>*)decoder)->logits((const float*)hidden, rows, num_threads, out);
    }
}

void paceline_draft(bool bf16, void* decoder, const PacelineBatch* batch, const int32_t* depths, int64_t max_depth,
                    int64_t* out) {
    if (bf16) {
        ((Decoder<bfloat16>*)decoder)->draft(*batch, depths, max_depth, out);
    } else {
        ((Decoder<float>*)decoder)->draft(*batch, depths, max_depth, out);
    }
}

// Operations by themselves.

// x [rows, inputs] times a matrix, plus its bias -> out [rows, outputs].
void paceline_linear(bool bf16, const void* x, const PacelineMatrix* matrix, int64_t rows, int64_t num_threads,
                     float* out) {
    if (bf16) {
        linear_alone((const bfloat16*)x, *matrix, rows, num_threads, out);
    } else {
        linear_alone((const float*)x, *matrix, rows, num_threads, out);
    }
}

// key and value [rows, num_kv_heads, head_dim] to the pages of a layer.
void paceline_store_kv(bool bf16, const void* key, const void* value, const PacelineBatch* batch, int64_t num_kv_heads,
                       int64_t head_dim) {
    if (bf16) {
        store_kv_alone((const bfloat16*)key, (const bfloat16*)value, *batch, {batch->block_size, num_kv_heads, head_dim});
    } else {
        store_kv_alone((const float*)key, (const float*)value, *batch, {batch->block_size, num_kv_heads, head_dim});
    }
}

// query [rows, num_heads, head_dim] over the pages of a layer -> out, likewise.
void paceline_paged_attention(bool bf16, const void* query, const PacelineBatch* batch, int64_t num_heads,
                              int64_t num_kv_heads, int64_t head_dim, float scale, void* out) {
    const Pages pages = {batch->block_size, num_kv_heads, head_dim};
    if (bf16) {
        attention_alone((const bfloat16*)query, *batch, pages, num_heads, scale, (bfloat16*)out);
    } else {
        attention_alone((const float*)query, *batch, pages, num_heads, scale, (float*)out);
    }
}
}
