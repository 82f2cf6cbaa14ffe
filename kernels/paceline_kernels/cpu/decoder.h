// A decoder-only transformer over paged KV, all of its layers in one call.
//
// Every thread of a team walks through the layers together with the others: an operation is a loop that they share, and
// ends with a barrier; but what all of them read of a single row each computes for itself. The residual stream and all
// sums are float32; what is multiplied is T, float or bfloat16, rounded once. Whatever an operation computes for a row
// follows from that row alone.
#pragma once

#include <vector>

#include "attention.h"
#include "pack.h"
#include "products.h"

namespace {

template <class T>
class Decoder {
public:
    explicit Decoder(const PacelineModel& model) : model_(model) {}

    // Hidden states after the final norm -> out [rows, hidden].
    void forward(const PacelineBatch& from, T* out) {
        run(from, [&](Team& team, int64_t rows) {
            team.share(rows, [&](int64_t row) {
                finish(row, [&](int64_t i) { return out + row * model_.hidden + i; });
            });
        });
    }

    // The same, and from there to the logits of `count` of the rows, those of `wanted` or, if that is null, the first ones
    // -> out [count, vocab].
    void logits_of(const PacelineBatch& from, const int64_t* wanted, int64_t count, float* out) {
        reserve_last(count, from.num_threads);
        run(from, [&](Team& team, int64_t) {
            const Tiled<Activation<T>> last = last_.own();
            team.share_rows(count, count, [&](int64_t index) {
                finish(wanted ? wanted[index] : index, [&](int64_t i) { return last.at(index, i); });
            });
            head(team, count, out);
        });
    }

    // Rows of hidden states [rows, hidden] -> out [rows, vocab].
    void logits(const T* hidden, int64_t rows, int64_t num_threads, float* out) {
        reserve_last(rows, num_threads);
        Team team(num_threads);
#pragma omp parallel num_threads(num_threads)
        {
            const Tiled<Activation<T>> last = last_.own();
            team.share_rows(rows, rows, [&](int64_t row) {
                const T* const from = hidden + row * model_.hidden;
                for (int64_t i = 0; i < model_.hidden; ++i) convert(from[i], *last.at(row, i));
            });
            head(team, rows, out);
        }
    }

    int64_t vocab_size() const { return model_.vocab; }

private:
    // All layers over the rows of a batch; then the team, which is still together, calls end(team, rows).
    template <class End>
    void run(const PacelineBatch& from, const End& end) {
        const Batch batch = {from.num_seqs, from.max_blocks, from.query_starts, from.context_lens, from.block_tables};
        const Pages pages = {from.block_size, model_.num_kv_heads, model_.head_dim};
        const int64_t rows = batch.query_starts[batch.num_seqs];
        const float scale = 1 / std::sqrt((float)model_.head_dim);
        const Attention<T> attention(batch, pages, model_.num_heads, scale, from.num_threads);
        locate(batch);
        reserve(rows, from.num_threads);
        T* const kv = (T*)from.kv;
        Team team(from.num_threads);
#pragma omp parallel num_threads(from.num_threads)
        {
            embed(team, from.token_ids, rows);
            for (int64_t index = 0; index < model_.num_layers; ++index) {
                const PacelineLayer& layer = model_.layers[index];
                T* const keys = kv + 2 * index * from.kv_elements;
                T* const values = keys + from.kv_elements;
                normalize(team, layer.input_norm, rows);
                project<T>(team, layer.qkv, normed_.own(), rows, room_, qkv_);
                place(team, layer, batch, pages, rows, keys, values);
                attention(team, attended_, query_, keys, values);
                add(team, attended_, rows, layer.output);
                normalize(team, layer.post_norm, rows);
                gate(team, rows, layer.gate_up);
                add(team, gated_, rows, layer.down);
            }
            end(team, rows);
        }
    }

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

    void reserve(int64_t rows, int64_t threads) {
        const int64_t heads = model_.num_heads * model_.head_dim;
        const int64_t all_heads = heads + 2 * model_.num_kv_heads * model_.head_dim;
        residual_ = {residual_memory_.get(Striped::elements(rows, model_.hidden)), rows};
        qkv_ = {qkv_memory_.get(Striped::elements(rows, all_heads)), rows};
        query_ = query_memory_.get(rows * heads);
        normed_.reserve(rows, model_.hidden, threads);
        attended_ = activations<T>(attended_memory_, rows, heads);
        gated_ = activations<T>(gated_memory_, rows, model_.intermediate);
        room_.reserve(rows, std::max({model_.hidden, heads, model_.intermediate}), threads);
    }

    void reserve_last(int64_t rows, int64_t threads) {
        last_.reserve(rows, model_.hidden, threads);
        last_room_.reserve(rows, model_.hidden, threads);
    }

    void embed(Team& team, const int64_t* token_ids, int64_t rows) {
        const PacelineMatrix& head = model_.head;
        team.share(rows, [&](int64_t row) {
            const int64_t token = token_ids[row];
            const auto copy = [&](const auto& element) {
                for (int64_t i = 0; i < model_.hidden; ++i) *residual_.at(row, i) = element(i);
            };
            if (model_.embedding) {
                const T* const from = (const T*)model_.embedding + token * model_.hidden;
                copy([&](int64_t i) { return to_float(from[i]); });
            } else if (head.scales) {
                copy([&, weights = packed8(head)](int64_t i) { return weight(weights, token, i); });
            } else {
                copy([&, weights = packed<T>(head)](int64_t i) { return weight(weights, token, i); });
            }
        });
    }

    // -- operations of a layer, shared by the team --

    // normed_ = the norm of residual_
    void normalize(Team& team, const float* weight, int64_t rows) {
        const Tiled<Activation<T>> to = normed_.own();
        team.share_rows(rows, rows, [&](int64_t row) {
            const auto from = [&](int64_t i) { return residual_.at(row, i); };
            normalize(from, weight, model_.hidden, [&](int64_t i) { return to.at(row, i); });
        });
    }

    // residual_ += x * matrix
    void add(Team& team, const Tiled<Activation<T>>& x, int64_t rows, const PacelineMatrix& matrix) {
        multiply_by<1, T>(team, matrix, x, rows, room_, [&](int64_t output, int64_t row, const float* const* sums) {
            for (int64_t i = 0; i < TILE; i += LANES) {
                const int64_t count = matrix.outputs - output - i;
                if (count <= 0) return;
                float* const to = residual_.at(row, output + i);
                store_some(to, load_some(to, count) + with_bias(sums[0] + i, matrix, output + i), count);
            }
        });
    }

    // gated_ = silu(gate) * up of normed_
    void gate(Team& team, int64_t rows, const PacelineMatrix& matrix) {
        const auto use = [&](int64_t output, int64_t row, const float* const* sums) {
            for (int64_t i = 0; i < TILE; i += LANES) {
                const Floats gate = with_bias(sums[0] + i, matrix, output + i);
                const Floats up = with_bias(sums[1] + i, matrix, output + TILE + i);
                const int64_t column = output / 2 + i, count = model_.intermediate - column;
                if (count <= 0) return;
                store_some(gated_.at(row, column), silu(gate) * up, count);
            }
        };
        multiply_by<2, T>(team, matrix, normed_.own(), rows, room_, use);
    }

    // Norm and rotation of queries and keys; queries go to query_, keys and values to their pages. Shared by heads,
    // since there may be but one row: those queries first that meet a key, then it and its value.
    void place(Team& team, const PacelineLayer& layer, const Batch& batch, const Pages& pages, int64_t rows, T* keys,
               T* values) {
        const int64_t heads = model_.num_heads, kv_heads = model_.num_kv_heads, size = model_.head_dim;
        const int64_t sharing = heads / kv_heads;
        team.share(rows * (heads + kv_heads), [&](int64_t item) {
            const int64_t row = item / (heads + kv_heads), position = positions_[row];
            const int64_t turn = item % (heads + kv_heads), kv_head = turn / (sharing + 1), query = turn % (sharing + 1);
            const int64_t head = query < sharing ? kv_head * sharing + query : heads + kv_head;
            thread_local Scratch numbers, rounded;
            float* const x = numbers.get<float>(size);
            qkv_.read(row, head * size, size, x);
            if (head < heads) return rotate(x, layer.q_norm, position, query_ + (row * heads + head) * size);
            T *const key = rounded.get<T>(2 * size), *const value = key + size;
            rotate(x, layer.k_norm, position, key);
            qkv_.read(row, (head + kv_heads) * size, size, x);
            for (int64_t i = 0; i < size; ++i) value[i] = from_float<T>(x[i]);
            const int64_t block = batch.block_tables[sequences_[row] * batch.max_blocks + position / pages.block_size];
            pages.write(keys, values, block, position % pages.block_size, kv_head, key, value);
        });
    }

    // One head, which is normalized in place first, if it is to be.
    void rotate(float* x, const float* norm, int64_t position, T* out) const {
        const int64_t half = model_.head_dim / 2;
        const auto element = [&](int64_t i) { return x + i; };
        if (norm) normalize(element, norm, model_.head_dim, element);
        const float *cos = model_.cos + position * half, *sin = model_.sin + position * half;
        for (int64_t i = 0; i < half; i += LANES) {
            const int64_t count = half - i;
            const Floats low = load_some(x + i, count), high = load_some(x + half + i, count);
            const Floats c = load_some(cos + i, count), s = load_some(sin + i, count);
            store_some(out + i, low * c - high * s, count);
            store_some(out + half + i, high * c + low * s, count);
        }
    }

    // Logits of the rows of last_ -> out [rows, vocab].
    void head(Team& team, int64_t rows, float* out) {
        project<T>(team, model_.head, last_.own(), rows, last_room_, RowMajor{out, model_.vocab});
    }

    // -- pieces --

    // The final norm of a row; `to` tells where 16 elements from the i-th go.
    template <class To>
    void finish(int64_t row, const To& to) const {
        normalize([&](int64_t i) { return residual_.at(row, i); }, model_.norm, model_.hidden, to);
    }

    // x over its root mean square, times weight; `from` and `to` tell where 16 elements from the i-th lie.
    template <class From, class To>
    void normalize(const From& from, const float* weight, int64_t size, const To& to) const {
        Floats squares = {};
        for (int64_t i = 0; i < size; i += LANES) {
            const Floats x = load_some((const float*)from(i), size - i);
            squares = fused(x, x, squares);
        }
        float sum = 0;
        for (int lane = 0; lane < LANES; ++lane) sum += squares[lane];
        const float scale = 1 / std::sqrt(sum / size + model_.eps);
        for (int64_t i = 0; i < size; i += LANES) {
            const int64_t count = size - i;
            store_some(to(i), load_some((const float*)from(i), count) * scale * load_some(weight + i, count), count);
        }
    }

    static Floats silu(Floats x) {
        const Floats most = all(88.0f);  // beyond, exp overflows
        return x * reciprocal(exp(smaller(-x, most)) + 1.0f);
    }

    const PacelineModel model_;
    std::vector<int64_t> positions_, sequences_;  // of each row
    Zeroed<float> residual_memory_, qkv_memory_;
    Zeroed<T> query_memory_;
    Zeroed<Activation<T>> attended_memory_, gated_memory_;
    Striped residual_, qkv_;  // [rows, hidden], [rows, heads of q, k and v]
    T* query_;                // [rows, num_heads, head_dim]
    Tiled<Activation<T>> attended_, gated_;  // [rows, num_heads * head_dim], [rows, intermediate]
    OwnActivations<T> normed_, last_;        // [rows, hidden], [rows whose logits are wanted, hidden]
    Quantized room_, last_room_;
};

}  // namespace
