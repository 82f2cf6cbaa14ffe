// Attention of the rows of a batch over its pages, with one accumulation order per output element.
//
// The rows of a run that are computed together, times the query heads that share a KV head, are the rows of a matrix of
// queries. It meets the positions chunk after chunk: scores = queries * keys, weights = 2^(scores - largest), and
// means = weights * values, corrected when a later chunk has a larger score (Milakov and Gimelshein, 2018). Chunks
// begin at fixed positions, and no row of a matrix product depends on another one, so a row's bits follow from its own
// query and from what it sees. What it does not see has weight zero; and that zero times an infinity or a NaN never
// comes about, because the values of a chunk are copied, without what nobody sees.
#pragma once

#include <cmath>
#include <optional>
#include <type_traits>
#include <vector>

#include "amx.h"
#include "layout.h"

namespace attention {

constexpr int CHUNK = 8;             // groups of 16 positions between two corrections; even, since a tile takes two
constexpr int64_t QUERIES = 128;     // that meet a chunk while it is in the cache
constexpr int ROWS = 4;              // of a matrix, whose sums a thread keeps in registers
constexpr float LOG2_E = 1.44269504f;
const Ints LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// 2^x for x <= 0, within 2e-7 of it, 1 at 0; below -126, where the result would be subnormal, 0. NaN stays NaN.
inline Floats power_of_two(Floats x) {
    // Adding 1.5 * 2^23 rounds to an integer n, which the low bits then hold: with the bias of an exponent, 2^n.
    const Floats shift = all(0x1.8p23f + 127);
    const Floats shifted = x + shift;
    const Floats r = x - (shifted - shift);
    // 2^r for |r| <= 1/2, the minimax polynomial for the relative error.
    Floats power = all(0x1.5bba14p-10f);
    power = fused(power, r, all(0x1.3cea88p-7f));
    power = fused(power, r, all(0x1.c6b752p-5f));
    power = fused(power, r, all(0x1.ebf9bcp-3f));
    power = fused(power, r, all(0x1.62e42ap-1f));
    power = fused(power, r, all(1.0f));
    return x < -126.0f ? Floats{} : power * (Floats)((Words)shifted << 23);
}

// No weight is subnormal, so the machine's own rounding does what ours does.
inline void store_weights(float* to, Floats x) { store(to, x); }

inline void store_weights(bfloat16* to, Floats x) {
#if defined(__AVX512BF16__)
    const __m256bh halves = _mm512_cvtneps_pbh((__m512)x);
    std::memcpy(to, &halves, sizeof halves);
#else
    store(to, x);
#endif
}

inline float largest_lane(Floats x) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)x);
#else
    return maximum(x);
#endif
}

// ---- Products of matrices ----

// sum + the dot products of one pair with the pairs in 16 lanes.
inline Floats add_products(Floats sum, const float* left, Floats right) { return fused(all(*left), right, sum); }

inline Floats add_products(Floats sum, const bfloat16* left, Floats right) {
    uint32_t bits;
    std::memcpy(&bits, left, sizeof bits);
    const Words pair = Words{} + bits;
#if defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512)pair, (__m512bh)(__m512)right);
#else
    sum = fused((Floats)(pair << 16), (Floats)((Words)right << 16), sum);
    return fused((Floats)(pair & 0xffff0000), (Floats)((Words)right & 0xffff0000), sum);
#endif
}

// A matrix in panels of 16 columns, cut into `count` parts of as many pairs of rows; the pairs of a part are `stride`
// elements apart.
template <class T, class Part>
struct Right {
    int64_t count, pairs, stride;
    Part part;  // of a panel and an index: where it begins
};

// out [rows, 16 * N] = left [rows, inner] times N panels from `first`. Computes rows up to a multiple of ROWS.
template <int N, class T, class Part>
void multiply(float* out, int64_t out_stride, const T* left, int64_t left_stride, int64_t rows,
              const Right<T, Part>& right, int64_t first) {
    for (int64_t row = 0; row < rows; row += ROWS) {
        Floats sums[ROWS][N] = {};
        const T* from = left + row * left_stride;
        for (int64_t i = 0; i < right.count; ++i) {
            const T* parts[N];
            for (int n = 0; n < N; ++n) parts[n] = right.part(first + n, i);
            for (int64_t k = 0; k < right.pairs; ++k, from += PAIR<T>) {
#pragma GCC unroll 4
                for (int n = 0; n < N; ++n) {
                    const Floats lanes = load((const float*)(parts[n] + k * right.stride));
#pragma GCC unroll 4
                    for (int r = 0; r < ROWS; ++r) sums[r][n] = add_products(sums[r][n], from + r * left_stride, lanes);
                }
            }
        }
        for (int r = 0; r < ROWS; ++r) {
            for (int n = 0; n < N; ++n) store(out + (row + r) * out_stride + (first + n) * LANES, sums[r][n]);
        }
    }
}

#ifdef AMX
// The tiles of a thread, while it lives: 0 to 3 for sums, 4 and 5 for factors with 16 pairs, 6 and 7 with 8.
class Factors {
public:
    Factors() {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 32, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 8};
        } config;
        _tile_loadconfig(&config);
    }
    Factors(const Factors&) = delete;
    Factors& operator=(const Factors&) = delete;
    ~Factors() { _tile_release(); }
};

#define MULTIPLY_PART(LEFT, RIGHT)                                                      \
    _tile_loadd(LEFT, left + 2 * i * right.pairs, left_stride * sizeof(bfloat16));      \
    _tile_loadd(RIGHT, right.part(first, i), stride);                                   \
    _tile_dpbf16ps(0, LEFT, RIGHT);                                                     \
    if constexpr (N > 1) {                                                              \
        _tile_loadd(RIGHT, right.part(first + 1, i), stride);                           \
        _tile_dpbf16ps(1, LEFT, RIGHT);                                                 \
    }                                                                                   \
    if constexpr (N > 2) {                                                              \
        _tile_loadd(RIGHT, right.part(first + 2, i), stride);                           \
        _tile_dpbf16ps(2, LEFT, RIGHT);                                                 \
        _tile_loadd(RIGHT, right.part(first + 3, i), stride);                           \
        _tile_dpbf16ps(3, LEFT, RIGHT);                                                 \
    }

// The same for 16 rows, and 16 or 8 pairs.
template <int N, class Part>
void multiply_tiles(float* out, int64_t out_stride, const bfloat16* left, int64_t left_stride,
                    const Right<bfloat16, Part>& right, int64_t first) {
    const int64_t stride = right.stride * sizeof(bfloat16);
    asm volatile("" ::: "memory");  // the intrinsics do not say that they read it
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (right.pairs == LANES) {
        for (int64_t i = 0; i < right.count; ++i) {
            MULTIPLY_PART(4, 5)
        }
    } else {
        for (int64_t i = 0; i < right.count; ++i) {
            MULTIPLY_PART(6, 7)
        }
    }
    _tile_stored(0, out + first * LANES, out_stride * sizeof(float));
    if constexpr (N > 1) _tile_stored(1, out + (first + 1) * LANES, out_stride * sizeof(float));
    if constexpr (N > 2) {
        _tile_stored(2, out + (first + 2) * LANES, out_stride * sizeof(float));
        _tile_stored(3, out + (first + 3) * LANES, out_stride * sizeof(float));
    }
    asm volatile("" ::: "memory");
}
#undef MULTIPLY_PART
#endif

}  // namespace attention

// Prepared once for a batch, used in every layer of its forward pass. Refers to the arrays of the batch.
template <class T>
class Attention {
public:
    // The scores are multiplied by `scale`. A sequence may have no rows; a row sees at least one position.
    Attention(const Batch& batch, const Pages& pages, int64_t num_heads, float scale)
        : pages_(pages),
          sharing_(num_heads / pages.num_kv_heads),
          groups_(pages.groups()),
          width_(round_up(pages.head_dim, LANES)),
          scale_(scale * attention::LOG2_E),
          tiles_(std::is_same_v<T, bfloat16> && pages.head_dim % PIECE<T> == 0 && has_tiles()) {
        // A decoded token and its drafts stay together: its context is read once.
        const int64_t most = std::max<int64_t>(LANES, attention::QUERIES / sharing_);
        for (int64_t i = 0; i < batch.num_seqs; ++i) {
            const int64_t end = batch.query_starts[i + 1];
            for (int64_t row = batch.query_starts[i]; row < end; row += most) {
                const int64_t visible = batch.context_lens[i] - (end - 1 - row);
                pieces_.push_back({row, std::min(most, end - row), visible, batch.block_tables + i * batch.max_blocks});
            }
        }
    }

    // out [num_tokens, num_heads * head_dim] from query [num_tokens, num_heads, head_dim] and the pages of one layer.
    // Every thread of a team calls it; all of `out` but its padding is written when it returns.
    void operator()(const Tiled<T>& out, const T* query, const T* keys, const T* values) const {
#ifdef AMX
        std::optional<attention::Factors> tiles;
        if (tiles_) tiles.emplace();
#endif
        const int64_t kv_heads = pages_.num_kv_heads, units = pieces_.size() * kv_heads;
#pragma omp for schedule(dynamic, 1)
        for (int64_t unit = 0; unit < units; ++unit) {
            attend({out, query, keys, values, unit % kv_heads}, pieces_[unit / kv_heads]);
        }
    }

private:
    static constexpr int64_t POSITIONS = attention::CHUNK * LANES;  // of a chunk

    // Consecutive rows of one sequence. The first of them sees `visible` positions, each next one more.
    struct Piece {
        int64_t first_row, rows, visible;
        const int32_t* blocks;

        int64_t context() const { return visible + rows - 1; }
    };

    // One layer, for one KV head.
    struct Layer {
        const Tiled<T>& out;
        const T *query, *keys, *values;
        int64_t kv_head;
    };

    // Up to 16 positions, from `begin`.
    struct Group {
        const T *keys, *values;
        int64_t begin, count;

        // How many of them, from the first, belong to the first `visible` positions.
        int64_t seen(int64_t visible) const { return std::clamp<int64_t>(visible - begin, 0, count); }
    };

    struct Chunk {
        int64_t count = 0;
        Group groups[attention::CHUNK];

        bool all_seen(int64_t visible) const {
            return std::all_of(groups, groups + count, [&](const Group& group) { return group.seen(visible) == LANES; });
        }
    };

    // The softmax of 16 queries, as far as it has come. A weight is 2^(score - base).
    struct Softmax {
        Floats base, totals[LANES];
    };

    // This thread's memory for `queries` queries, a multiple of 16.
    struct Memory {
        T *queries, *values, *weights;
        float *sums, *scores, *means;
        Softmax* states;

        Memory(int64_t queries_count, int64_t head_dim, int64_t width) {
            thread_local Scratch scratch[7];
            queries = scratch[0].get<T>(queries_count * head_dim);
            values = scratch[1].get<T>(POSITIONS * width);
            weights = scratch[2].get<T>(LANES * POSITIONS);
            sums = scratch[3].get<float>(queries_count * width);
            scores = scratch[4].get<float>(LANES * POSITIONS);
            means = scratch[5].get<float>(LANES * width);
            states = scratch[6].get<Softmax>(queries_count / LANES);
        }
    };

    // Groups up to the one of a position, in the order of positions.
    int64_t groups_until(int64_t position) const {
        return position / pages_.block_size * groups_ + position % pages_.block_size / LANES + 1;
    }

    // Of the groups from `first` that the piece sees, as many as a chunk has.
    Chunk chunk(const Layer& layer, const Piece& piece, int64_t first) const {
        Chunk chunk;
        const int64_t count = std::min<int64_t>(attention::CHUNK, groups_until(piece.context() - 1) - first);
        int64_t block = first / groups_, offset = first % groups_ * LANES;
        while (chunk.count < count) {
            const int64_t begin = pages_.group(piece.blocks[block], layer.kv_head, offset);
            chunk.groups[chunk.count++] = {layer.keys + begin, layer.values + begin, block * pages_.block_size + offset,
                                           std::min<int64_t>(LANES, pages_.block_size - offset)};
            __builtin_prefetch(layer.keys + begin);
            __builtin_prefetch(layer.values + begin);
            offset += LANES;
            if (offset >= pages_.block_size) offset = 0, ++block;
        }
        return chunk;
    }

    // Copies [16 / pair][head_dim][pair] to [16 / pair][width][pair], zeros for positions not among the first `seen`.
    // Returns whether what it copied is finite.
    bool copy_seen(T* to, const T* from, int64_t seen) const {
        Ints infinite = {};
        for (int64_t position = 0; position < LANES; position += PAIR<T>) {
            const int64_t kept = std::clamp<int64_t>(seen - position, 0, PAIR<T>);
            const Words mask = Words{} + (uint32_t)((1ull << (8 * sizeof(T) * kept)) - 1);
            const T* const pairs = from + position * pages_.head_dim;
            for (int64_t d = 0; d < width_; d += LANES) {
                const Floats some = ::load((const float*)(pairs + d * PAIR<T>), pages_.head_dim - d, 0);
                const Words bits = (Words)some & mask;
                store((float*)(to + position * width_ + d * PAIR<T>), (Floats)bits);
                const uint32_t exponent = sizeof(T) == 4 ? 0x7f800000 : 0x7f80;
                infinite |= (bits & exponent) == exponent;
                infinite |= (bits & 0x7f800000) == 0x7f800000;
            }
        }
        return !any(infinite);
    }

    // Copies the values of groups that not all rows see entirely, or that do not fill vectors. Returns whether a row may
    // go by the copy alone: false where values that not all rows see are not finite.
    bool separate(Chunk& chunk, T* copies, const Piece& piece) const {
        bool finite = true;
        for (int64_t g = 0; g < chunk.count; ++g) {
            Group& group = chunk.groups[g];
            if (group.seen(piece.visible) == LANES && width_ == pages_.head_dim) continue;
            T* const copy = copies + g * LANES * width_;
            finite &= copy_seen(copy, group.values, group.seen(piece.context()));
            group.values = copy;
        }
        return finite || piece.rows == 1;
    }

    void attend(const Layer& layer, const Piece& piece) const {
        const int64_t queries = piece.rows * sharing_, groups = groups_until(piece.context() - 1);
        const Memory memory(round_up(queries, LANES), pages_.head_dim, width_);
        begin(memory, layer, piece);
        Chunk next = chunk(layer, piece, 0);
        for (int64_t first = 0; first < groups; first += attention::CHUNK) {
            Chunk current = next;
            next = chunk(layer, piece, std::min(first + attention::CHUNK, groups - 1));
            if (!separate(current, memory.values, piece)) {
                // Alone, a row sees a position or it does not.
                for (int64_t i = 0; i < piece.rows; ++i) {
                    attend(layer, {piece.first_row + i, 1, piece.visible + i, piece.blocks});
                }
                return;
            }
            for (int64_t query = 0; query < queries; query += LANES) {
                add_chunk(memory, current, piece, query, std::min<int64_t>(LANES, queries - query));
            }
        }
        finish(memory, layer, piece);
    }

    // Query i of a piece is head i % sharing of row i / sharing.
    void begin(const Memory& memory, const Layer& layer, const Piece& piece) const {
        const int64_t queries = piece.rows * sharing_, run = sharing_ * pages_.head_dim;
        for (int64_t i = 0; i < piece.rows; ++i) {
            const T* from = layer.query + ((piece.first_row + i) * pages_.num_kv_heads + layer.kv_head) * run;
            std::copy_n(from, run, memory.queries + i * run);
        }
        const int64_t padded = round_up(queries, LANES);
        std::fill(memory.queries + queries * pages_.head_dim, memory.queries + padded * pages_.head_dim, T{});
        std::fill_n(memory.sums, padded * width_, 0.0f);
        std::fill_n(memory.states, padded / LANES, Softmax{all(-INFINITY), {}});
    }

    // One chunk for `count` queries from `query`.
    void add_chunk(const Memory& memory, const Chunk& chunk, const Piece& piece, int64_t query, int64_t count) const {
        const int64_t pairs = pages_.head_dim / PAIR<T>, step = tiles_ ? LANES : pairs;
        const auto keys = [&](int64_t group, int64_t i) { return chunk.groups[group].keys + i * step * PIECE<T>; };
        product(memory.scores, POSITIONS, memory.queries + query * pages_.head_dim, pages_.head_dim, count, chunk.count,
                attention::Right<T, decltype(keys)>{pairs / step, step, PIECE<T>, keys});
        const Floats correction = weigh(memory, chunk, piece, query, count);
        const auto values = [&](int64_t column, int64_t g) { return chunk.groups[g].values + column * PIECE<T>; };
        product(memory.means, width_, memory.weights, POSITIONS, count, width_ / LANES,
                attention::Right<T, decltype(values)>{chunk.count, LANES / PAIR<T>, width_ * PAIR<T>, values});
        for (int64_t i = 0; i < count; ++i) {
            float* const sums = memory.sums + (query + i) * width_;
            for (int64_t d = 0; d < width_; d += LANES) {
                store(sums + d, fused(load(sums + d), all(correction[i]), load(memory.means + i * width_ + d)));
            }
        }
    }

    template <class Right>
    void product(float* out, int64_t out_stride, const T* left, int64_t left_stride, int64_t rows, int64_t panels,
                 const Right& right) const {
        int64_t first = 0;
        for (; first + 4 <= panels; first += 4) multiply<4>(out, out_stride, left, left_stride, rows, right, first);
        for (; first + 2 <= panels; first += 2) multiply<2>(out, out_stride, left, left_stride, rows, right, first);
        for (; first < panels; ++first) multiply<1>(out, out_stride, left, left_stride, rows, right, first);
    }

    template <int N, class Right>
    void multiply(float* out, int64_t out_stride, const T* left, int64_t left_stride, int64_t rows, const Right& right,
                  int64_t first) const {
#ifdef AMX
        if constexpr (std::is_same_v<T, bfloat16>) {
            if (tiles_) return attention::multiply_tiles<N>(out, out_stride, left, left_stride, right, first);
        }
#endif
        attention::multiply<N>(out, out_stride, left, left_stride, rows, right, first);
    }

    // Weights of `count` queries for a chunk, from their scores. Returns what has been summed before must be multiplied by.
    Floats weigh(const Memory& memory, const Chunk& chunk, const Piece& piece, int64_t query, int64_t count) const {
        Softmax& state = memory.states[query / LANES];
        alignas(64) float largest[LANES] = {};
        for (int64_t i = 0; i < count; ++i) {
            float* const scores = memory.scores + i * POSITIONS;
            const int64_t visible = piece.visible + (query + i) / sharing_;
            if (!chunk.all_seen(visible)) hide(scores, chunk, visible);
            Floats most = load(scores);
            for (int64_t g = 1; g < chunk.count; ++g) {
                const Floats some = load(scores + g * LANES);
                most = some > most ? some : most;
            }
            largest[i] = attention::largest_lane(most);
        }
        const Floats scaled = load(largest) * scale_;
        const Floats base = scaled > state.base ? scaled : state.base;
        const Floats correction = attention::power_of_two(state.base - base);
        state.base = base;
        for (int64_t i = 0; i < count; ++i) {
            const float* const scores = memory.scores + i * POSITIONS;
            T* const weights = memory.weights + i * POSITIONS;
            for (int64_t g = 0; g < chunk.count; ++g) {
                const Floats power = fused(load(scores + g * LANES), all(scale_), all(-base[i]));
                attention::store_weights(weights + g * LANES, attention::power_of_two(power));
            }
            if (chunk.count % 2 == 1) store(weights + chunk.count * LANES, Floats{});
            // The weights as they were rounded, so that equal values have just that mean.
            Floats total = state.totals[i] * correction[i];
            const T ones[] = {from_float<T>(1), from_float<T>(1)};
            for (int64_t k = 0; k < chunk.count * LANES; k += PIECE<T>) {
                total = attention::add_products(total, ones, load((const float*)(weights + k)));
            }
            state.totals[i] = total;
        }
        return correction;
    }

    static void hide(float* scores, const Chunk& chunk, int64_t visible) {
        for (int64_t g = 0; g < chunk.count; ++g) {
            const Ints seen = attention::LANE < (int32_t)chunk.groups[g].seen(visible);
            store(scores + g * LANES, seen ? load(scores + g * LANES) : all(-INFINITY));
        }
    }

    void finish(const Memory& memory, const Layer& layer, const Piece& piece) const {
        for (int64_t i = 0; i < piece.rows * sharing_; ++i) {
            const int64_t row = piece.first_row + i / sharing_;
            const int64_t column = (layer.kv_head * sharing_ + i % sharing_) * pages_.head_dim;
            const Floats lanes = memory.states[i / LANES].totals[i % LANES];
            float total = 0;
            for (int lane = 0; lane < LANES; ++lane) total += lanes[lane];
            for (int64_t d = 0; d < pages_.head_dim; d += LANES) {
                // Adding zero takes its sign from a zero: products with weight zero may have changed it.
                const Floats mean = load(memory.sums + i * width_ + d) / total + 0.0f;
                if (pages_.head_dim % LANES == 0) {
                    store(layer.out.at(row, column + d), mean);
                } else {
                    for (int64_t j = 0; j < std::min<int64_t>(LANES, pages_.head_dim - d); ++j) {
                        *layer.out.at(row, column + d + j) = from_float<T>(mean[j]);
                    }
                }
            }
        }
    }

    Pages pages_;
    int64_t sharing_, groups_, width_;
    float scale_;
    bool tiles_;
    std::vector<Piece> pieces_;
};
