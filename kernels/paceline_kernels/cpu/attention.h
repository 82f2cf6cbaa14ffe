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
#include "factors.h"
#include "fetch.h"
#include "team.h"

namespace attention {

constexpr int64_t CHUNK = 8;                  // groups of 16 positions
constexpr int64_t POSITIONS = CHUNK * LANES;  // of a chunk
constexpr int64_t QUERIES = 64;               // of a head that meet a chunk while it is in the cache
constexpr int64_t MOST_HEADS = 8;             // that are computed together
constexpr int REGISTERS = LANES / REGISTER_LANES;
// Of a product, at most.
#if defined(__AVX512F__)
constexpr int ROWS = 8, PANELS = 4;
#else
constexpr int ROWS = 4, PANELS = 2;
#endif

// Panels that so many rows meet at once: their sums stay in registers.
constexpr int panels_at_once(int64_t rows) {
    int panels = PANELS;
    while (panels > 1 && !fit((int)rows, panels * REGISTERS)) panels /= 2;
    return panels;
}

// ---- Lanes ----

constexpr float LOG2_E = 1.44269504f;

// 2^x for x <= 0 or hardly above, within 2e-7 of it, or within 1.1e-4 if it is ROUNDED to bfloat16 then, which is a
// twentieth of what that changes. 1 at 0; 0 below -126, where it would be subnormal. NaN stays NaN.
template <bool ROUNDED>
inline Register power_of_two(Register x) {
    // Adding 1.5 * 2^23 rounds to an integer n, which the low bits then hold, here with the bias of an exponent.
    const Register shift = broadcast(0x1.8p23f + 127);
    const Register shifted = x + shift;
    const Register r = x - (shifted - shift);
    // 2^r for |r| <= 1/2, the minimax polynomial for the relative error.
    Register power;
    if constexpr (ROUNDED) {
        power = broadcast(0x1.c2a218p-5f);
        power = multiply_add(power, r, broadcast(0x1.f00c4ep-3f));
        power = multiply_add(power, r, broadcast(0x1.62f5fap-1f));
    } else {
        power = broadcast(0x1.5bba14p-10f);
        power = multiply_add(power, r, broadcast(0x1.3cea88p-7f));
        power = multiply_add(power, r, broadcast(0x1.c6b752p-5f));
        power = multiply_add(power, r, broadcast(0x1.ebf9bcp-3f));
        power = multiply_add(power, r, broadcast(0x1.62e42ap-1f));
    }
    power = multiply_add(power, r, broadcast(1.0f));
    return x < -126.0f ? Register{} : power * (Register)((Bits)shifted << 23);
}

inline float sum_of_lanes(Floats x) {
    const Half half = low(x) + high(x);
    return ((half[0] + half[1]) + (half[2] + half[3])) + ((half[4] + half[5]) + (half[6] + half[7]));
}

// No weight is subnormal, so the machine rounds it as store() does.
template <class T>
inline void store_weights(T* to, Floats x) {
#if defined(__AVX512BF16__)
    if constexpr (!std::is_same_v<T, float>) {
        const __m256i halves = (__m256i)_mm512_cvtneps_pbh((__m512)x);
        if constexpr (std::is_same_v<T, bfloat16>) std::memcpy(to, &halves, sizeof halves);
        if constexpr (std::is_same_v<T, WideHalf>) {
            store(&to->value, (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
        }
        return;
    }
#endif
    store(to, x);
}

// ---- Memory ----

// What is read next, fetched a little at a time, as evenly as what is computed meanwhile takes time, in the order of memory:
// asked for at once, it would hold up what stands behind. Blocks lie too far apart for the prefetcher of the memory, and
// tile loads do not wake it.
class Ahead {
public:
    void add(const void* begin, int64_t bytes) {
        const Span span = {(const char*)begin, (const char*)begin + bytes};
        if (count_ > 0 && spans_[count_ - 1].end == span.begin) {
            spans_[count_ - 1].end = span.end;
        } else {
            spans_[count_++] = span;
        }
        lines_ += bytes / 64;
    }

    int64_t lines() const { return lines_; }

    // Over so many calls of `step`, evenly.
    void spread(int64_t steps) { steps_ = steps * FEW; }

    inline void step() {
        due_ += lines_;
        if (due_ < steps_) return;
        due_ -= steps_;
        fetch();
    }

    // A few lines.
    inline void fetch() {
        if (turns_ == 0 && !go_on()) return;
        --turns_;
        if (in_turn_) {
            fetch<PAGE>();
            at_ += 64;
        } else {
            fetch<64>();
            at_ += 64 * FEW;
        }
    }

private:
    static constexpr int FEW = 4;  // lines that are asked for at once; between products of vectors 2 are slower

#if defined(TILES)
    static constexpr bool BY_PAGES = false;
#else
    static constexpr bool BY_PAGES = IN_TURN;
#endif

    struct Span {
        const char *begin, *end;  // begin moves on
    };

    // So many bytes from each other. The compiler leaves out functions that do nothing but __builtin_prefetch.
    template <int64_t APART>
    inline void fetch() const {
#pragma GCC unroll 4
        for (int line = 0; line < FEW; ++line) {
#if defined(TILES)
            asm volatile("prefetcht1 %0" ::"m"(at_[APART * line]));
#elif defined(__x86_64__)
            asm volatile("prefetcht2 %0" ::"m"(at_[APART * line]));
#else
            __builtin_prefetch(at_ + APART * line, 0, 1);
#endif
        }
    }

    // To the next stretch. Lines of one that is not whole would change place with somebody else's.
    bool go_on() {
        while (next_ < count_ && spans_[next_].begin == spans_[next_].end) ++next_;
        if (next_ == count_) return false;
        Span& span = spans_[next_];
        at_ = span.begin;
        const int64_t left = span.end - at_, most = BY_PAGES ? STRETCH - (uintptr_t)at_ % STRETCH : left;
        in_turn_ = BY_PAGES && most == STRETCH && left >= STRETCH;
        span.begin += std::min(most, left);
        turns_ = ceil_div(std::min(most, left), 64 * FEW);
        return true;
    }

    Span spans_[2 * CHUNK * MOST_HEADS];
    int count_ = 0, next_ = 0;
    int64_t lines_ = 0, steps_ = 0, due_ = 0;
    const char* at_ = nullptr;  // of a stretch, what is asked for next
    int64_t turns_ = 0;         // that it takes from there
    bool in_turn_ = false;
};

// ---- Products of matrices ----

// Up to 16 rows that meet panels, [size / PIECE][16][PIECE]: one address serves them all. `Tiled` of a height that the
// compiler knows.
template <class X>
struct Left {
    X* data;

    X* at(int64_t row, int64_t k) const { return data + (k / PIECE<X> * LANES + row) * PIECE<X> + k % PIECE<X>; }
};

// Rows of a matrix, `stride` elements apart.
struct Rows {
    float* data;
    int64_t stride;
};

// A matrix of `size` rows in `count` panels of 16 columns. Each has parts of 16 rows, the last perhaps of fewer:
// [16 / pair][16][pair], with pairs `stride` elements apart; `at(panel, part)` says where one begins.
template <class At>
struct Panels {
    int64_t count, size, stride;
    At at;
};
template <class At>
Panels(int64_t, int64_t, int64_t, At) -> Panels<At>;

// N panels from `first` of out = left * right, for ROWS rows from `row` on.
template <int N, int ROWS, class T, class X, class At>
void multiply_rows(Rows out, Left<X> left, int64_t row, const Panels<At>& right, int64_t first, Ahead& ahead) {
    constexpr int WIDTH = N * REGISTERS;
    // The part that comes next goes to the first cache meanwhile; more rows wait for arithmetic, not for the second one.
    constexpr bool NEXT = IN_TURN && ROWS <= 4;
    Register sums[ROWS][WIDTH] = {};
    for (int64_t k = 0; k < right.size;) {
        const int64_t part = k / LANES, end = std::min(k + LANES, right.size);
        const bool inside = end < right.size, last = !inside && first + 2 * N > right.count;
        const T *panels[N], *next[N];
        for (int n = 0; n < N; ++n) {
            panels[n] = right.at(first + n, part);
            if (NEXT) next[n] = last ? panels[n] : inside ? right.at(first + n, part + 1) : right.at(first + N + n, 0);
        }
        for (const X* from = left.at(row, k); k < end; k += PAIR<T>, from += PAIR<T>) {
            ahead.step();
            const X* rows[ROWS];
#pragma GCC unroll 8
            for (int i = 0; i < ROWS; ++i) rows[i] = from + i * PIECE<X>;
            const auto weights = [&](int column) {
                return panels[column / REGISTERS] + column % REGISTERS * REGISTER_LANES * PAIR<T>;
            };
            step<T>(sums, weights, rows, 0);
#pragma GCC unroll 4
            for (int n = 0; n < N; ++n) {
                panels[n] += right.stride;
                if (!NEXT) continue;
                __builtin_prefetch(next[n], 0, 3);
                next[n] += right.stride;
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; ++i) {
        float* const to = out.data + (row + i) * out.stride + first * LANES;
#pragma GCC unroll 8
        for (int column = 0; column < WIDTH; ++column) store_register(to + column * REGISTER_LANES, sums[i][column]);
    }
}

// Calls use(count) for a count from 1 to MOST, as a constant.
template <int MOST, class Use>
inline void as_constant(int64_t count, const Use& use) {
    if constexpr (MOST > 1) {
        if (count < MOST) return as_constant<MOST - 1>(count, use);
    }
    use(std::integral_constant<int, MOST>());
}

// The same for as many rows as there are.
template <int N, class T, class X, class At>
void multiply(Rows out, Left<X> left, int64_t rows, const Panels<At>& right, int64_t first, Ahead& ahead) {
    for (int64_t row = 0; row < rows; row += ROWS) {
        as_constant<ROWS>(std::min<int64_t>(ROWS, rows - row), [&](auto count) {
            constexpr int COUNT = decltype(count)::value, AT_ONCE = std::min(N, panels_at_once(COUNT));
            for (int n = 0; n < N; n += AT_ONCE) {
                multiply_rows<AT_ONCE, COUNT, T>(out, left, row, right, first + n, ahead);
            }
        });
    }
}

#ifdef TILES
// Four tiles for sums; then a left and a right factor with 16 pairs, and such with the 8 pairs of a group of positions.
// What has fewer than 16 rows is done sooner.
inline TileShapes shapes(int64_t rows) {
    TileShapes shapes;
    for (int tile : {0, 1, 2, 3, 4, 6}) shapes.rows[tile] = (uint8_t)rows;
    shapes.row_bytes[6] = 32;
    shapes.rows[7] = LANES / 2;
    return shapes;
}

// The same for as many rows as the tiles have, and a multiple of PAIRS pairs.
template <int PAIRS, int... N, class At>
void multiply_tiles(std::integer_sequence<int, N...>, Rows out, Left<bfloat16> left, const Panels<At>& right,
                    int64_t first, Ahead& ahead) {
    constexpr int LEFT = PAIRS == 16 ? 4 : 6, RIGHT = LEFT + 1;
    asm volatile("" ::: "memory");  // tile loads do not say what they read
    (clear_tile<N>(), ...);
    for (int64_t k = 0; k < right.size; k += 2 * PAIRS) {
        load_tile<LEFT>(left.at(0, k), 64);
        ((load_tile<RIGHT>(right.at(first + N, k / LANES), right.stride * sizeof(bfloat16)),
          multiply_bfloat16_tiles<N, LEFT, RIGHT>(), ahead.fetch(), ahead.fetch()),  // once or four times is slower
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
    // Scores are multiplied by `scale`, which is positive. Every row sees at least one position. What is computed does
    // not depend on the number of threads.
    Attention(const Batch& batch, const Pages& pages, int64_t num_heads, float scale, int64_t threads)
        : pages_(pages),
          groups_(pages.groups()),
          sharing_(num_heads / pages.num_kv_heads),
          width_(round_up(pages.head_dim, LANES)),
          scale_(scale * attention::LOG2_E),
          tiles_(std::is_same_v<T, bfloat16> && pages.head_dim % PIECE<T> == 0 && has_tiles()) {
        for (int64_t i = 0; i < batch.num_seqs; ++i) {
            // In this order, what a piece reads of the pages is near to what the piece before it read.
            cut_run(batch, i, ceil_div(batch.num_seqs * pages.num_kv_heads, threads));
        }
    }

    // out [num_tokens, num_heads * head_dim] from query [num_tokens, num_heads, head_dim] and the pages of one layer,
    // which hold the rows' own keys and values already. Every thread of a team calls it; when it returns, all of `out`
    // but its padding is written.
    void operator()(Team& team, const Tiled<Activation<T>>& out, const T* query, const T* keys, const T* values) const {
        const Layer layer = {out, query, keys, values};
        // A thread begins with the same piece in every layer and step, whose pages its core may have in a cache. It takes
        // its next one before it computes the one that it holds.
        const size_t own = omp_get_thread_num();
        const Piece* held = own < pieces_.size() ? &pieces_[own] : nullptr;
#pragma omp for schedule(dynamic, 1) nowait
        for (size_t i = omp_get_num_threads(); i < pieces_.size(); ++i) {
            attend(layer, *held, &pieces_[i]);
            held = &pieces_[i];
        }
        if (held) attend(layer, *held, nullptr);
        team.meet();
    }

private:
    struct Layer {
        const Tiled<Activation<T>>& out;
        const T *query, *keys, *values;
    };

    struct Range {
        int64_t first, count;
    };

    // What is computed together: consecutive rows of one sequence, with the query heads of some KV heads, which lie side
    // by side in the pages. The first row sees `visible` positions, each next one more.
    struct Piece {
        int64_t first_head, heads, first_row, rows, visible;
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

    // Of one head; those of the next heads lie `Pages::head_elements` apart.
    struct Chunk {
        int64_t count = 0;
        Group groups[attention::CHUNK];

        Chunk moved(int64_t elements) const {
            Chunk chunk = *this;
            for (int64_t g = 0; g < count; ++g) chunk.groups[g].keys += elements, chunk.groups[g].values += elements;
            return chunk;
        }

        bool all_seen(int64_t visible) const {
            return std::all_of(groups, groups + count, [=](const Group& it) { return it.seen(visible) == LANES; });
        }
    };

    // The softmax of 16 queries, as far as it has come.
    struct Softmax {
        Floats base;
        float totals[LANES][LANES];  // of a query, by lane
    };

    // Of the queries of one KV head: query i is head i % sharing of row i / sharing.
    struct State {
        Activation<T>* queries;
        int64_t padded;
        float* sums;
        Softmax* softmax;

        // Those that are computed together with a query.
        attention::Left<Activation<T>> together(int64_t query) const {
            return {queries + query / LANES * LANES * padded};
        }
    };

    // Of 16 queries of one KV head and one chunk.
    struct Work {
        T* values;  // copies of some
        attention::Left<Activation<T>> weights;
        float *scores, *means;
    };

    // This thread's, for one piece at a time.
    struct Memory {
        Activation<T>* queries;
        float* sums;
        Softmax* softmax;
        T* values;
        Activation<T>* weights;
        float *scores, *means;
        int64_t room, padded, width;  // queries of a head; head_dim in whole pieces; and in whole vectors

        // For queries of each head, of which so many are computed together.
        Memory(int64_t heads, int64_t room, int64_t together, int64_t head_dim, int64_t width)
            : room(room), padded(Tiled<Activation<T>>::padded(head_dim)), width(width) {
            thread_local Scratch scratch[7];
            queries = scratch[0].get<Activation<T>>(heads * query_elements());
            sums = scratch[1].get<float>(heads * room * width);
            softmax = scratch[2].get<Softmax>(heads * ceil_div(room, LANES));
            values = scratch[3].get<T>(together * attention::POSITIONS * width);
            weights = scratch[4].get<Activation<T>>(together * LANES * attention::POSITIONS);
            scores = scratch[5].get<float>(together * LANES * attention::POSITIONS);
            means = scratch[6].get<float>(together * LANES * width);
        }

        // Of a head, in tiles of 16.
        int64_t query_elements() const { return round_up(room, LANES) * padded; }

        State state(int64_t head) const {
            const int64_t first = head * room;
            return {queries + head * query_elements(), padded, sums + first * width,
                    softmax + head * ceil_div(room, LANES)};
        }

        // Of a head among those that are computed together.
        Work work(int64_t index) const {
            const int64_t size = index * LANES * attention::POSITIONS;
            return {values + index * attention::POSITIONS * width,
                    {weights + size},
                    scores + size,
                    means + index * LANES * width};
        }
    };

    // In pieces of at most `most_heads` heads.
    void cut_run(const Batch& batch, int64_t sequence, int64_t most_heads) {
        // A decoded token and its drafts stay together: their context is read once.
        const int64_t most = std::max<int64_t>(LANES, attention::QUERIES / sharing_);
        const int64_t begin = batch.query_starts[sequence], end = batch.query_starts[sequence + 1];
        if (begin == end) return;
        const int64_t queries = round_up(std::min(most, end - begin) * sharing_, LANES);
        const int64_t many = tiles_ ? attention::QUERIES : attention::MOST_HEADS * LANES;
        const int64_t heads = std::clamp<int64_t>(many / queries, 1, std::min(most_heads, attention::MOST_HEADS));
        for (int64_t head = 0; head < pages_.num_kv_heads; head += heads) {
            for (int64_t row = begin; row < end; row += most) {
                const int64_t visible = batch.context_lens[sequence] - (end - 1 - row);
                pieces_.push_back({head, std::min(heads, pages_.num_kv_heads - head), row, std::min(most, end - row),
                                   visible, batch.block_tables + sequence * batch.max_blocks});
            }
        }
    }

    // `next`, which may be null, is the piece that this thread computes after it. Meanwhile values of the same positions are
    // fetched, and then the keys that come next.
    void attend(const Layer& layer, const Piece& piece, const Piece* next) const {
        const int64_t queries = piece.rows * sharing_, groups = groups_until(piece.context() - 1);
#ifdef TILES
        const Tiles tiles(attention::shapes(std::min<int64_t>(LANES, queries)));
#endif
        const int64_t together = tiles_ ? 1 : piece.heads;
        const Memory memory(piece.heads, room_for(queries), together, pages_.head_dim, width_);
        for (int64_t head = 0; head < piece.heads; ++head) begin(memory.state(head), layer, piece, head);
        Chunk current = find(layer, piece, 0);
        for (int64_t first = 0; first < groups; first += attention::CHUNK) {
            const bool ends = first + attention::CHUNK >= groups;
            const Piece* const after = ends ? next : &piece;
            const Chunk following = after ? find(layer, *after, ends ? 0 : first + attention::CHUNK) : Chunk{};
            for (int64_t head = 0; head < piece.heads; head += together) {
                Chunk chunks[attention::MOST_HEADS];
                for (int64_t i = 0; i < together; ++i) {
                    chunks[i] = current.moved((head + i) * pages_.head_elements());
                    if (!copy_values(memory.work(i).values, chunks[i], piece)) {
                        return attend_one_by_one(layer, piece, next);
                    }
                }
                // Vectors fetch one after the other, as fast in all phases; tiles what is read next in each.
                attention::Ahead values, apart;
                attention::Ahead& keys = tiles_ ? apart : values;
                add_lines(values, current, &Group::values, {head, together});
                const int64_t lines = std::max<int64_t>(1, values.lines());
                if (head + together < piece.heads) {
                    add_lines(keys, current, &Group::keys, {head + together, together});
                } else if (after) {
                    add_lines(keys, following, &Group::keys, {0, std::min(together, after->heads)});
                }
                // Values must be there when the first queries have their weights.
                const int64_t first_queries = std::min<int64_t>(LANES, queries);
                const int64_t soonest = together * steps_to_weights(first_queries, current.count);
                const int64_t all = together * (steps_to_weights(queries, current.count) +
                                                steps(queries, width_ / LANES, current.count * LANES / PAIR<T>));
                values.spread(std::min(all, soonest * values.lines() / lines));
                for (int64_t query = 0; query < queries; query += LANES) {
                    const int64_t count = std::min<int64_t>(LANES, queries - query);
                    add(memory, {head, together}, chunks, piece, {query, count}, values, keys);
                }
            }
            current = following;
        }
        for (int64_t head = 0; head < piece.heads; ++head) finish(memory.state(head), layer, piece, head);
    }

    // Times that vectors call Ahead::step for so many queries and groups of positions, of one head.
    int64_t steps_to_weights(int64_t queries, int64_t groups) const {
        return steps(queries, groups, pages_.head_dim / PAIR<T>) + queries * ceil_div(groups, 2);
    }

    // The same in products of so many rows and panels of so many pairs.
    static int64_t steps(int64_t rows, int64_t panels, int64_t pairs) {
        const auto of = [&](int64_t some) {
            constexpr int64_t MOST = attention::PANELS;
            return (panels / MOST * (MOST / attention::panels_at_once(some)) + panels % MOST) * pairs;
        };
        const int64_t left = rows % attention::ROWS;
        return rows / attention::ROWS * of(attention::ROWS) + (left ? of(left) : 0);
    }

    // Keys or values of some heads, in the order of memory; the chunk is of the first head of their piece.
    void add_lines(attention::Ahead& to, const Chunk& chunk, const T* Group::*part, Range heads) const {
        for (int64_t g = 0, end; g < chunk.count; g = end) {
            const T* const begin = chunk.groups[g].*part;
            for (end = g + 1; end < chunk.count; ++end) {  // groups of a head in one block lie side by side
                if (chunk.groups[end].*part != begin + (end - g) * pages_.group_elements()) break;
            }
            for (int64_t head = heads.first; head < heads.first + heads.count; ++head) {
                to.add(begin + head * pages_.head_elements(), (end - g) * pages_.group_elements() * sizeof(T));
            }
        }
    }

    // Alone, a row either sees a value or does not.
    void attend_one_by_one(const Layer& layer, const Piece& piece, const Piece* next) const {
        for (int64_t i = 0; i < piece.rows; ++i) {
            const Piece row = {piece.first_head, piece.heads, piece.first_row + i, 1, piece.visible + i, piece.blocks};
            attend(layer, row, i + 1 == piece.rows ? next : nullptr);
        }
    }

    void begin(const State& state, const Layer& layer, const Piece& piece, int64_t head) const {
        const int64_t size = sharing_ * pages_.head_dim, queries = piece.rows * sharing_, room = room_for(queries);
        for (int64_t i = 0; i < piece.rows; ++i) {
            const int64_t row = piece.first_row + i;
            const T* from = layer.query + (row * pages_.num_kv_heads + piece.first_head + head) * size;
            for (int64_t query = i * sharing_; query < (i + 1) * sharing_; ++query, from += pages_.head_dim) {
                const attention::Left<Activation<T>> left = state.together(query);
                for (int64_t d = 0; d < pages_.head_dim; d += LANES) {
                    const int64_t count = std::min<int64_t>(LANES, pages_.head_dim - d);
                    for (int64_t j = 0; j < count; ++j) convert(from[d + j], left.at(query % LANES, d)[j]);
                }
            }
        }
        for (int64_t query = queries; query < room; ++query) {
            for (int64_t d = 0; d < pages_.head_dim; ++d) *state.together(query).at(query % LANES, d) = {};
        }
        std::fill_n(state.sums, room * width_, 0.0f);
        for (int64_t query = 0; query < queries; query += LANES) {
            Softmax& softmax = state.softmax[query / LANES];
            softmax.base = all(-INFINITY);
            std::fill_n(softmax.totals[0], std::min<int64_t>(LANES, queries - query) * LANES, 0.0f);
        }
    }

    // Rows that so many queries take: those of whole tiles, on the matrix unit.
    int64_t room_for(int64_t queries) const { return tiles_ ? round_up(queries, LANES) : queries; }

    // Groups up to the one of a position, in the order of positions.
    int64_t groups_until(int64_t position) const {
        return position / pages_.block_size * groups_ + position % pages_.block_size / LANES + 1;
    }

    // Groups of the first head from `first` on, as many as there are.
    Chunk find(const Layer& layer, const Piece& piece, int64_t first) const {
        const int64_t count = std::min(attention::CHUNK, groups_until(piece.context() - 1) - first);
        Chunk chunk;
        int64_t block = first / groups_, offset = first % groups_ * LANES;
        while (chunk.count < count) {
            const int64_t at = pages_.group(piece.blocks[block], piece.first_head, offset);
            chunk.groups[chunk.count++] = {layer.keys + at, layer.values + at, block * pages_.block_size + offset,
                                           std::min<int64_t>(LANES, pages_.block_size - offset)};
            offset += LANES;
            if (offset >= pages_.block_size) offset = 0, ++block;
        }
        return chunk;
    }

    // Puts copies in the place of values that not all see, with zeros where nobody sees them; and of all values, if they
    // must be padded. Returns false if that is not enough.
    bool copy_values(T* to, Chunk& chunk, const Piece& piece) const {
        bool finite = true;
        for (int64_t g = 0; g < chunk.count; ++g, to += LANES * width_) {
            Group& group = chunk.groups[g];
            if (group.seen(piece.visible) == LANES && width_ == pages_.head_dim) continue;
            finite &= copy_seen(to, group.values, group.seen(piece.context()));
            group.values = to;
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

    // One chunk of each of some heads, for 16 queries at most: of all heads the weights first, then the means, so that memory
    // is read in few long stretches, which hold the heads side by side.
    void add(const Memory& memory, Range heads, const Chunk* chunks, const Piece& piece, Range queries,
             attention::Ahead& values, attention::Ahead& keys) const {
        const int64_t groups = chunks[0].count;
        Floats corrections[attention::MOST_HEADS];
        for (int64_t i = 0; i < heads.count; ++i) {
            const State state = memory.state(heads.first + i);
            const Work work = memory.work(i);
            const attention::Panels of_keys = {
                groups, pages_.head_dim, PIECE<T>,
                [&](int64_t group, int64_t part) { return chunks[i].groups[group].keys + part * LANES * LANES; }};
            multiply<16>({work.scores, attention::POSITIONS}, state.together(queries.first), queries.count, of_keys,
                         values);
            corrections[i] = weigh(work, state.softmax[queries.first / LANES], chunks[i], piece, queries, values);
        }
        for (int64_t i = 0; i < heads.count; ++i) {
            const Work work = memory.work(i);
            const attention::Panels of_values = {
                width_ / LANES, groups * LANES, width_ * PAIR<T>,
                [&](int64_t column, int64_t group) { return chunks[i].groups[group].values + column * PIECE<T>; }};
            multiply<8>({work.means, width_}, work.weights, queries.count, of_values, keys);
            const float* const means = work.means;
            for (int64_t query = 0; query < queries.count; ++query) {
                float* const sums = memory.state(heads.first + i).sums + (queries.first + query) * width_;
                for (int64_t d = 0; d < width_; d += LANES) {
                    store(sums + d, fused(load(sums + d), all(corrections[i][query]), load(means + query * width_ + d)));
                }
            }
        }
    }

    // out = left * right; on tiles, of so many pairs, for every number of rows, or their bits would differ.
    template <int PAIRS, class At>
    void multiply(attention::Rows out, attention::Left<Activation<T>> left, int64_t rows,
                  const attention::Panels<At>& right, attention::Ahead& ahead) const {
        const auto some = [&](auto count, int64_t first) {
            constexpr int N = decltype(count)::value;
#ifdef TILES
            if constexpr (std::is_same_v<T, bfloat16>) {
                constexpr auto SEQUENCE = std::make_integer_sequence<int, N>();
                if (tiles_) return attention::multiply_tiles<PAIRS>(SEQUENCE, out, left, right, first, ahead);
            }
#endif
            attention::multiply<N, T>(out, left, rows, right, first, ahead);
        };
        constexpr int MOST = attention::PANELS;
        int64_t first = 0;
        for (; first + MOST <= right.count; first += MOST) some(std::integral_constant<int, MOST>(), first);
        for (; first < right.count; ++first) some(std::integral_constant<int, 1>(), first);
    }

    // Weights from scores, which are overwritten; returns what earlier sums of each query must be multiplied by.
    Floats weigh(const Work& work, Softmax& state, const Chunk& chunk, const Piece& piece, Range queries,
                 attention::Ahead& ahead) const {
        const int64_t query = queries.first, count = queries.count;
        const bool all_seen = chunk.all_seen(piece.visible + query / sharing_);
        Floats largest = {};
        for (int64_t i = 0; i < count; ++i) {
            float* const scores = work.scores + i * attention::POSITIONS;
            if (!all_seen) hide(scores, chunk, piece.visible + (query + i) / sharing_);
            Floats most = all(-INFINITY);
            for (int64_t g = 0; g < chunk.count; ++g) {
                const Floats score = load(scores + g * LANES);
                most = larger(score, most);
            }
            largest[i] = maximum(most);
        }
        const Floats scaled = largest * scale_;
        const Floats base = larger(scaled, state.base);
        const Floats correction = powers_of_two<false>(state.base - base);
        state.base = base;
        for (int64_t i = 0; i < count; ++i) {
            const float* const scores = work.scores + i * attention::POSITIONS;
            for (int64_t g = 0; g < chunk.count; ++g) {
                if (!tiles_ && g % 2 == 0) ahead.step();
                const Floats power = fused(load(scores + g * LANES), all(scale_), all(-base[i]));
                constexpr bool ROUNDED = std::is_same_v<T, bfloat16>;
                attention::store_weights(work.weights.at(i, g * LANES), powers_of_two<ROUNDED>(power));
            }
            // Pairs of bfloat16 are added in twos.
            if (chunk.count % 2 == 1) std::fill_n(work.weights.at(i, chunk.count * LANES), LANES, Activation<T>{});
            add_up(state.totals[i], work.weights, i, chunk.count * LANES, correction[i]);
        }
        return correction;
    }

    template <bool ROUNDED>
    static Floats powers_of_two(Floats x) {
        return by_registers<Floats>([](auto x) { return attention::power_of_two<ROUNDED>(x); }, x);
    }

    // totals = totals * correction + the weights as they were rounded, so that a mean of equal values is that value.
    static void add_up(float* totals, attention::Left<Activation<T>> weights, int64_t row, int64_t count,
                       float correction) {
        using Both = Factors<T, Activation<T>>;
        constexpr int64_t STEP = LANES * PAIR<T> / Both::PARTS;
        for (int lane = 0; lane < LANES; lane += REGISTER_LANES) {
            Register total = load_register(totals + lane) * correction;
            for (int64_t k = lane * PAIR<T> / Both::PARTS; k < count; k += STEP) {
                if constexpr (std::is_same_v<Activation<T>, bfloat16>) {
                    const bfloat16 ones[] = {from_float<bfloat16>(1), from_float<bfloat16>(1)};
                    total = multiply_add_pairs((Bits)load_register(weights.at(row, k)), broadcast_word(ones), total);
                } else {
                    total += load_register(weights.at(row, k));
                }
            }
            store_register(totals + lane, total);
        }
    }

    static void hide(float* scores, const Chunk& chunk, int64_t visible) {
        for (int64_t g = 0; g < chunk.count; ++g) {
            for (int64_t lane = chunk.groups[g].seen(visible); lane < LANES; ++lane) scores[g * LANES + lane] = -INFINITY;
        }
    }

    void finish(const State& state, const Layer& layer, const Piece& piece, int64_t head) const {
        for (int64_t i = 0; i < piece.rows * sharing_; ++i) {
            const int64_t row = piece.first_row + i / sharing_;
            const int64_t column = ((piece.first_head + head) * sharing_ + i % sharing_) * pages_.head_dim;
            const Floats total = all(attention::sum_of_lanes(load(state.softmax[i / LANES].totals[i % LANES])));
            for (int64_t d = 0; d < pages_.head_dim; d += LANES) {
                // Whether a zero is negative may depend on products with weight zero: adding zero makes it positive.
                const Floats mean = load(state.sums + i * width_ + d) / total + 0.0f;
                write(layer.out, row, column + d, mean, pages_.head_dim - d);
            }
        }
    }

    // The first `left` of 16 elements, which may lie in two tiles.
    void write(const Tiled<Activation<T>>& out, int64_t row, int64_t column, Floats x, int64_t left) const {
        if (pages_.head_dim % LANES == 0) return store(out.at(row, column), x);
        for (int64_t j = 0; j < std::min<int64_t>(LANES, left); ++j) *out.at(row, column + j) = from_float<Activation<T>>(x[j]);
    }

    Pages pages_;
    int64_t groups_, sharing_, width_;
    float scale_;
    bool tiles_;
    std::vector<Piece> pieces_;
};
