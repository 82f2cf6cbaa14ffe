// Attention of the rows of a batch over the pages, with one accumulation order per output element.
//
// The rows of a run that are computed together, times the query heads that share a KV head, are the rows of one matrix.
// Chunk after chunk of positions it becomes scores = queries * keys, weights = 2^(scores - base) and
// means = weights * values; the base is the largest score so far, and what was summed before is corrected when it
// grows (Milakov and Gimelshein, 2018).
//
// Chunks begin at fixed positions and rows of a matrix product never meet, so the bits of a row follow from its query
// and from what it sees. What it does not see weighs zero, and adds zero as long as the value is finite: values that
// nobody sees are therefore left out, and rows are computed one by one where a value that only some see is not finite.
#pragma once

#include <cmath>
#include <type_traits>
#include <utility>
#include <vector>

#include "amx.h"
#include "layout.h"

namespace attention {

constexpr int64_t CHUNK = 8;                  // groups of 16 positions; even, since a tile takes two
constexpr int64_t POSITIONS = CHUNK * LANES;  // of a chunk
constexpr int64_t QUERIES = 64;               // that meet a chunk while it is in the cache
constexpr int64_t ROWS = 4;                   // of a product, and panels: their sums stay in registers
#if defined(__AVX512F__)
constexpr int64_t PANELS = 4;
#else
constexpr int64_t PANELS = 1;
#endif

// ---- Lanes ----

constexpr float LOG2_E = 1.44269504f;
const Ints LANE = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// 2^x for x <= 0 or hardly above, within 2e-7 of it, 1 at 0; 0 below -126, where it would be subnormal. NaN stays NaN.
inline Floats power_of_two(Floats x) {
    // Adding 1.5 * 2^23 rounds to an integer n, which the low bits then hold, here with the bias of an exponent.
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

inline float sum_of_lanes(Floats x) {
    const Half half = low(x) + high(x);
    return ((half[0] + half[1]) + (half[2] + half[3])) + ((half[4] + half[5]) + (half[6] + half[7]));
}

// No weight is subnormal, so the machine rounds it as store() does.
inline void store_weights(float* to, Floats x) { store(to, x); }

inline void store_weights(bfloat16* to, Floats x) {
#if defined(__AVX512BF16__)
    const __m256bh halves = _mm512_cvtneps_pbh((__m512)x);
    std::memcpy(to, &halves, sizeof halves);
#else
    store(to, x);
#endif
}

// ---- Products of matrices ----

// What a register holds: some lanes of a vector. Compilers keep wider ones in memory, at many times the cost.
#if defined(__AVX512F__)
typedef Floats Register;
#else
typedef Half Register;
#endif
typedef uint32_t Bits __attribute__((vector_size(sizeof(Register))));
constexpr int WIDTH = sizeof(Register) / sizeof(float);

inline Register load_register(const void* from) {
    Register x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

inline void store_register(float* to, Register x) { std::memcpy(to, &x, sizeof x); }

inline Register multiply_add(Register a, Register b, Register c) {
#if defined(__AVX512F__)
    return fused(a, b, c);
#else
    return a * b + c;
#endif
}

// sum + the dot products of one pair with the pairs in the lanes.
inline Register add_products(Register sum, const float* pair, Register lanes) {
    return multiply_add(*pair - Register{}, lanes, sum);
}

inline Register add_products(Register sum, const bfloat16* pair, Register lanes) {
    uint32_t bits;
    std::memcpy(&bits, pair, sizeof bits);
    const Bits left = Bits{} + bits, right = (Bits)lanes;
#if defined(__AVX512BF16__)
    return (Register)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512)left, (__m512bh)(__m512)right);
#else
    sum = multiply_add((Register)(left << 16), (Register)(right << 16), sum);
    return multiply_add((Register)(left & 0xffff0000), (Register)(right & 0xffff0000), sum);
#endif
}

// Rows of a matrix, `stride` elements apart.
template <class T>
struct Rows {
    T* data;
    int64_t stride;
};

// A matrix in panels of 16 columns, each [pairs][16][pair] with pairs `stride` elements apart; `panel` of an index says
// where one begins.
template <class Panel>
struct Panels {
    int64_t pairs, stride;
    Panel panel;
};
template <class Panel>
Panels(int64_t, int64_t, Panel) -> Panels<Panel>;

// N panels from `first` of out = left * right, for `rows` rows and some more, up to a multiple of ROWS.
template <int N, class T, class Panel>
void multiply(Rows<float> out, Rows<const T> left, int64_t rows, const Panels<Panel>& right, int64_t first) {
    constexpr int PARTS = LANES / WIDTH;
    const T* panels[N];
    for (int n = 0; n < N; ++n) panels[n] = right.panel(first + n);
    for (int64_t row = 0; row < rows; row += ROWS) {
        const T* const pairs = left.data + row * left.stride;
        Register sums[ROWS][N * PARTS] = {};
        for (int64_t k = 0; k < right.pairs; ++k) {
#pragma GCC unroll 8
            for (int n = 0; n < N * PARTS; ++n) {
                const T* const line = panels[n / PARTS] + k * right.stride;
                const Register lanes = load_register(line + n % PARTS * WIDTH * PAIR<T>);
#pragma GCC unroll 4
                for (int r = 0; r < ROWS; ++r) {
                    sums[r][n] = add_products(sums[r][n], pairs + r * left.stride + k * PAIR<T>, lanes);
                }
            }
        }
        for (int r = 0; r < ROWS; ++r) {
            float* const to = out.data + (row + r) * out.stride + first * LANES;
            for (int n = 0; n < N * PARTS; ++n) store_register(to + n * WIDTH, sums[r][n]);
        }
    }
}

#ifdef AMX
// The same for 16 rows and a multiple of 16 pairs, for panels counted from `first`.
template <int... N, class Panel>
void multiply_tiles(std::integer_sequence<int, N...>, Rows<float> out, Rows<const bfloat16> left,
                    const Panels<Panel>& right, int64_t first) {
    constexpr int LEFT = sizeof...(N), RIGHT = LEFT + 1;
    asm volatile("" ::: "memory");  // tile loads do not say what they read
    (clear_tile<N>(), ...);
    for (int64_t k = 0; k < right.pairs; k += LANES) {
        load_tile<LEFT>(left.data + 2 * k, left.stride * sizeof(bfloat16));
        ((load_tile<RIGHT + N % 2>(right.panel(first + N) + k * right.stride, right.stride * sizeof(bfloat16)),
          multiply_bfloat16_tiles<N, LEFT, RIGHT + N % 2>()),
         ...);
    }
    (store_tile<N>(out.data + (first + N) * LANES, out.stride * sizeof(float)), ...);
}
#endif

}  // namespace attention

// Prepared once for a batch, used in every layer of its forward pass. Refers to the arrays of the batch.
template <class T>
class Attention {
public:
    // Scores are multiplied by `scale`, which is positive. Every row sees at least one position.
    Attention(const Batch& batch, const Pages& pages, int64_t num_heads, float scale)
        : pages_(pages),
          groups_(pages.groups()),
          sharing_(num_heads / pages.num_kv_heads),
          width_(round_up(pages.head_dim, LANES)),
          scale_(scale * attention::LOG2_E),
          tiles_(std::is_same_v<T, bfloat16> && pages.head_dim % PIECE<T> == 0 && has_tiles()) {
        for (int64_t i = 0; i < batch.num_seqs; ++i) {
            // In this order, what a piece reads of the pages is near to what the piece before it read.
            for (int64_t head = 0; head < pages.num_kv_heads; ++head) cut_run(batch, i, head);
        }
    }

    // out [num_tokens, num_heads * head_dim] from query [num_tokens, num_heads, head_dim] and the pages of one layer,
    // which hold the rows' own keys and values already. Every thread of a team calls it; when it returns, all of `out`
    // but its padding is written.
    void operator()(const Tiled<T>& out, const T* query, const T* keys, const T* values) const {
        const Tiles tiles;
        const Layer layer = {out, query, keys, values};
#pragma omp for schedule(dynamic, 1)
        for (size_t i = 0; i < pieces_.size(); ++i) attend(layer, pieces_[i]);
    }

private:
    struct Layer {
        const Tiled<T>& out;
        const T *query, *keys, *values;
    };

    // What is computed together: consecutive rows of one sequence, with the query heads of one KV head. The first row
    // sees `visible` positions, each next one more.
    struct Piece {
        int64_t kv_head, first_row, rows, visible;
        const int32_t* blocks;

        int64_t context() const { return visible + rows - 1; }
    };

    // `count` positions from `begin`; the other lanes belong to nobody.
    struct Group {
        const T *keys, *values;
        int64_t begin, count;

        // How many lanes, from the first, are among the first `visible` positions.
        int64_t seen(int64_t visible) const { return std::clamp<int64_t>(visible - begin, 0, count); }
    };

    struct Chunk {
        int64_t count = 0;
        Group groups[attention::CHUNK];

        bool all_seen(int64_t visible) const {
            return std::all_of(groups, groups + count, [=](const Group& it) { return it.seen(visible) == LANES; });
        }
    };

    // The softmax of 16 queries, as far as it has come.
    struct Softmax {
        Floats base;
        float totals[LANES][LANES];  // of a query, by lane
    };

    // This thread's, for one piece at a time, `count` queries padded to a multiple of 16: query i is head i % sharing
    // of row i / sharing. Scores, weights and means are of 16 queries and one chunk.
    struct Memory {
        T *queries, *values, *weights;
        float *sums, *scores, *means;
        Softmax* states;

        Memory(int64_t count, int64_t head_dim, int64_t width) {
            thread_local Scratch scratch[7];
            queries = scratch[0].get<T>(count * head_dim);
            values = scratch[1].get<T>(attention::POSITIONS * width);
            weights = scratch[2].get<T>(LANES * attention::POSITIONS);
            sums = scratch[3].get<float>(count * width);
            scores = scratch[4].get<float>(LANES * attention::POSITIONS);
            means = scratch[5].get<float>(LANES * width);
            states = scratch[6].get<Softmax>(count / LANES);
        }
    };

    void cut_run(const Batch& batch, int64_t sequence, int64_t kv_head) {
        // A decoded token and its drafts stay together: their context is read once.
        const int64_t most = std::max<int64_t>(LANES, attention::QUERIES / sharing_);
        const int64_t end = batch.query_starts[sequence + 1];
        for (int64_t row = batch.query_starts[sequence]; row < end; row += most) {
            const int64_t visible = batch.context_lens[sequence] - (end - 1 - row);
            pieces_.push_back({kv_head, row, std::min(most, end - row), visible,
                               batch.block_tables + sequence * batch.max_blocks});
        }
    }

    void attend(const Layer& layer, const Piece& piece) const {
        const int64_t queries = piece.rows * sharing_, groups = groups_until(piece.context() - 1);
        const Memory memory(round_up(queries, LANES), pages_.head_dim, width_);
        begin(memory, layer, piece);
        for (int64_t first = 0; first < groups; first += attention::CHUNK) {
            const Chunk chunk = find(layer, piece, first, std::min(attention::CHUNK, groups - first));
            if (!copy_values(memory.values, chunk, piece)) return attend_one_by_one(layer, piece);
            for (int64_t query = 0; query < queries; query += LANES) {
                add(memory, chunk, piece, query, std::min<int64_t>(LANES, queries - query));
            }
        }
        finish(memory, layer, piece);
    }

    // Alone, a row either sees a value or does not.
    void attend_one_by_one(const Layer& layer, const Piece& piece) const {
        for (int64_t i = 0; i < piece.rows; ++i) {
            attend(layer, {piece.kv_head, piece.first_row + i, 1, piece.visible + i, piece.blocks});
        }
    }

    void begin(const Memory& memory, const Layer& layer, const Piece& piece) const {
        const int64_t size = sharing_ * pages_.head_dim, padded = round_up(piece.rows * sharing_, LANES);
        for (int64_t i = 0; i < piece.rows; ++i) {
            const T* const from = layer.query + ((piece.first_row + i) * pages_.num_kv_heads + piece.kv_head) * size;
            std::copy_n(from, size, memory.queries + i * size);
        }
        std::fill(memory.queries + piece.rows * size, memory.queries + padded * pages_.head_dim, T{});
        std::fill_n(memory.sums, padded * width_, 0.0f);
        std::fill_n(memory.states, padded / LANES, Softmax{all(-INFINITY), {}});
    }

    // Groups up to the one of a position, in the order of positions.
    int64_t groups_until(int64_t position) const {
        return position / pages_.block_size * groups_ + position % pages_.block_size / LANES + 1;
    }

    // `count` groups from `first`. Their number is made even by one without positions.
    Chunk find(const Layer& layer, const Piece& piece, int64_t first, int64_t count) const {
        Chunk chunk;
        int64_t block = first / groups_, offset = first % groups_ * LANES;
        while (chunk.count < count) {
            const int64_t at = pages_.group(piece.blocks[block], piece.kv_head, offset);
            chunk.groups[chunk.count++] = {layer.keys + at, layer.values + at, block * pages_.block_size + offset,
                                           std::min<int64_t>(LANES, pages_.block_size - offset)};
            // Its first line would wait until the address is translated, too; the others follow soon enough.
            __builtin_prefetch(layer.keys + at);
            __builtin_prefetch(layer.values + at);
            offset += LANES;
            if (offset >= pages_.block_size) offset = 0, ++block;
        }
        if (count % 2 == 1) {
            chunk.groups[count] = chunk.groups[count - 1];
            chunk.groups[count].count = 0;
            ++chunk.count;
        }
        return chunk;
    }

    // Values of a chunk one after the other, zeros where nobody sees them. Returns false if that is not enough.
    bool copy_values(T* to, const Chunk& chunk, const Piece& piece) const {
        bool finite = true;
        for (int64_t g = 0; g < chunk.count; ++g, to += LANES * width_) {
            const Group& group = chunk.groups[g];
            if (group.seen(piece.visible) == LANES && width_ == pages_.head_dim) {
                std::memcpy(to, group.values, LANES * width_ * sizeof(T));
            } else {
                finite &= copy_seen(to, group.values, group.seen(piece.context()));
            }
        }
        return finite || piece.rows == 1;
    }

    // [16 / pair][head_dim][pair] as [16 / pair][width][pair], zeros behind the first `seen` of 16 positions. Returns
    // whether all that was copied is finite.
    bool copy_seen(T* to, const T* from, int64_t seen) const {
        Ints infinite = {};
        for (int64_t position = 0; position < LANES; position += PAIR<T>) {
            const int64_t kept = std::clamp<int64_t>(seen - position, 0, PAIR<T>);
            const Words mask = Words{} + (uint32_t)((1ull << (8 * sizeof(T) * kept)) - 1);
            for (int64_t d = 0; d < width_; d += LANES) {
                const float* const pairs = (const float*)(from + position * pages_.head_dim + d * PAIR<T>);
                const Words bits = (Words)load(pairs, pages_.head_dim - d, 0) & mask;
                store((float*)(to + position * width_ + d * PAIR<T>), (Floats)bits);
                infinite |= (bits & 0x7f800000) == 0x7f800000;
                if (PAIR<T> == 2) infinite |= (bits & 0x7f80) == 0x7f80;
            }
        }
        return !any(infinite);
    }

    // One chunk for `count` queries from `query`.
    void add(const Memory& memory, const Chunk& chunk, const Piece& piece, int64_t query, int64_t count) const {
        const attention::Rows<const T> queries = {memory.queries + query * pages_.head_dim, pages_.head_dim};
        const attention::Panels keys = {pages_.head_dim / PAIR<T>, PIECE<T>,
                                        [&](int64_t group) { return chunk.groups[group].keys; }};
        multiply(memory.scores, attention::POSITIONS, queries, count, keys, chunk.count);
        const Floats correction = weigh(memory, chunk, piece, query, count);
        const attention::Rows<const T> weights = {memory.weights, attention::POSITIONS};
        const attention::Panels values = {
            chunk.count * LANES / PAIR<T>, width_ * PAIR<T>,
            [&](int64_t column) -> const T* { return memory.values + column * PIECE<T>; }};
        multiply(memory.means, width_, weights, count, values, width_ / LANES);
        for (int64_t i = 0; i < count; ++i) {
            float* const sums = memory.sums + (query + i) * width_;
            for (int64_t d = 0; d < width_; d += LANES) {
                store(sums + d, fused(load(sums + d), all(correction[i]), load(memory.means + i * width_ + d)));
            }
        }
    }

    // `panels` panels of out = left * right; on tiles for every number of rows, or their bits would differ.
    template <class Panel>
    void multiply(float* out, int64_t out_stride, attention::Rows<const T> left, int64_t rows,
                  const attention::Panels<Panel>& right, int64_t panels) const {
        const auto some = [&](auto count, int64_t first) {
            constexpr int N = decltype(count)::value;
#ifdef AMX
            if constexpr (std::is_same_v<T, bfloat16>) {
                constexpr auto SEQUENCE = std::make_integer_sequence<int, N>();
                if (tiles_) return attention::multiply_tiles(SEQUENCE, {out, out_stride}, left, right, first);
            }
#endif
            attention::multiply<N>({out, out_stride}, left, rows, right, first);
        };
        constexpr int MOST = attention::PANELS;
        int64_t first = 0;
        for (; first + MOST <= panels; first += MOST) some(std::integral_constant<int, MOST>(), first);
        for (; first < panels; ++first) some(std::integral_constant<int, 1>(), first);
    }

    // Weights from scores, which are overwritten; returns what earlier sums of each query must be multiplied by.
    Floats weigh(const Memory& memory, const Chunk& chunk, const Piece& piece, int64_t query, int64_t count) const {
        Softmax& state = memory.states[query / LANES];
        const bool all_seen = chunk.all_seen(piece.visible + query / sharing_);
        Floats largest = {};
        for (int64_t i = 0; i < count; ++i) {
            float* const scores = memory.scores + i * attention::POSITIONS;
            if (!all_seen) hide(scores, chunk, piece.visible + (query + i) / sharing_);
            Floats most = all(-INFINITY);
            for (int64_t g = 0; g < chunk.count; ++g) {
                const Floats score = load(scores + g * LANES);
                most = score > most ? score : most;
            }
            largest[i] = maximum(most);
        }
        const Floats scaled = largest * scale_;
        const Floats base = scaled > state.base ? scaled : state.base;
        const Floats correction = attention::power_of_two(state.base - base);
        state.base = base;
        for (int64_t i = 0; i < count; ++i) {
            const float* const scores = memory.scores + i * attention::POSITIONS;
            T* const weights = memory.weights + i * attention::POSITIONS;
            for (int64_t g = 0; g < chunk.count; ++g) {
                const Floats power = fused(load(scores + g * LANES), all(scale_), all(-base[i]));
                attention::store_weights(weights + g * LANES, attention::power_of_two(power));
            }
            // Of the weights as they were rounded, so that a mean of equal values is that value.
            const T ones[] = {from_float<T>(1), from_float<T>(1)};
            for (int lane = 0; lane < LANES; lane += attention::WIDTH) {
                float* const to = state.totals[i] + lane;
                attention::Register total = attention::load_register(to) * correction[i];
                for (int64_t k = lane * PAIR<T>; k < chunk.count * LANES; k += PIECE<T>) {
                    total = attention::add_products(total, ones, attention::load_register(weights + k));
                }
                attention::store_register(to, total);
            }
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
            const int64_t column = (piece.kv_head * sharing_ + i % sharing_) * pages_.head_dim;
            const Floats total = all(attention::sum_of_lanes(load(memory.states[i / LANES].totals[i % LANES])));
            for (int64_t d = 0; d < pages_.head_dim; d += LANES) {
                // Whether a zero is negative may depend on products with weight zero: adding zero makes it positive.
                const Floats mean = load(memory.sums + i * width_ + d) / total + 0.0f;
                write(layer.out, row, column + d, mean, pages_.head_dim - d);
            }
        }
    }

    // The first `left` of 16 elements, which may lie in two tiles.
    void write(const Tiled<T>& out, int64_t row, int64_t column, Floats x, int64_t left) const {
        if (pages_.head_dim % LANES == 0) return store(out.at(row, column), x);
        for (int64_t j = 0; j < std::min<int64_t>(LANES, left); ++j) *out.at(row, column + j) = from_float<T>(x[j]);
    }

    Pages pages_;
    int64_t groups_, sharing_, width_;
    float scale_;
    bool tiles_;
    std::vector<Piece> pieces_;
};
