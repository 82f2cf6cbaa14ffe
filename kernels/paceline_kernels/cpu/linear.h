// Rows of activations times packed weights. An output element has one accumulation order, whatever rows stand beside
// its own and however many threads there are: from the first input to the last, or as the matrix unit adds up a tile,
// tile after tile. So a token's numbers do not depend on the batch that it is computed in.
#pragma once

#include <omp.h>

#include <array>
#include <utility>

#include "amx.h"
#include "layout.h"

namespace {

constexpr int64_t TILE = 2 * LANES;       // outputs of one tile of weights
constexpr int64_t MOST_ROWS = 3 * LANES;  // that meet a tile at once

// ---- Operands ----

// Weights [outputs, inputs] in tiles of 32 outputs, one after the other, each [inputs / pair][32][pair]: a stream that
// is read once, from its begin to its end. Missing outputs and inputs are zeros.
template <class T>
struct Packed {
    using Element = T;
    using Input = Tiled<T>;

    const T* data;
    int64_t outputs, inputs;

    static int64_t padded(int64_t inputs) { return Tiled<T>::padded(inputs); }
    static int64_t tile_elements(int64_t inputs) { return TILE * padded(inputs); }
    const T* tile(int64_t index) const { return data + index * tile_elements(inputs); }
};

constexpr int64_t GROUP = 128;  // inputs that share a scale in quantized activations
constexpr int OFFSET = 128;     // of 8-bit weights, which are stored unsigned

// The same of 8 bits, [inputs / 4][32][4], with a scale for each output. They are multiplied in integers, exactly, by
// activations of 8 bits.
struct Packed8 {
    using Element = uint8_t;
    struct Input;

    const uint8_t* data;
    int64_t outputs, inputs;
    const float* scales;  // [outputs], padded to tiles

    static int64_t padded(int64_t inputs) { return round_up(inputs, GROUP); }
    static int64_t tile_elements(int64_t inputs) { return TILE * padded(inputs); }
    const uint8_t* tile(int64_t index) const { return data + index * tile_elements(inputs); }
};

// Activations of 8 bits: a scale for each row and group of inputs (as in Dettmers et al., "LLM.int8()", 2022, but for
// groups, so that an outlier costs its neighbours alone their precision).
struct Packed8::Input {
    Tiled<int8_t> values;
    float* scales;         // [rows / 16][groups][16]
    int32_t* corrections;  // likewise: minus OFFSET times the sum of the values

    int64_t groups() const { return values.size / GROUP; }
    int64_t index(int64_t row, int64_t group) const { return (row / LANES * groups() + group) * LANES + row % LANES; }
};

// Of one tile of weights with up to MOST_ROWS rows.
struct Sums {
    alignas(64) float at[MOST_ROWS][TILE];
};

// Inputs [begin, end), which a product takes at a time; whole pieces and groups. It goes on with the sums of those before,
// if there are any, so that an element is added up in the same order however it is cut.
struct Span {
    int64_t begin, end;
};

// ---- Vectors, an output in each lane ----

// How many rows at a time leave their sums in registers.
#if defined(__AVX512F__)
constexpr int ROWS_AT_ONCE = 12;
#elif defined(__AVX2__)
constexpr int ROWS_AT_ONCE = 3;
#else
constexpr int ROWS_AT_ONCE = 1;
#endif

constexpr int64_t AHEAD = 1024;  // bytes from what is multiplied to what is fetched, if it is not the next tile

// Called for every two lines of weights. While a tile is multiplied out of the second cache, LINES of the next one come
// there: so memory is read evenly, however many rows a tile meets. Without a next one, for few rows, and for several
// tiles at once, LINES is 0.
template <int LINES>
inline void fetch(const void* weights, const char* next) {
    if constexpr (LINES == 0) {
        __builtin_prefetch((const char*)weights + AHEAD);
        __builtin_prefetch((const char*)weights + AHEAD + 64);
    } else {
        for (int line = 0; line < LINES; ++line) __builtin_prefetch(next + 64 * line, 0, 2);
    }
}

// Neighbouring tiles that are walked side by side: memory is read faster in several places at once.
template <class Element>
struct Neighbours {
    const Element* first;  // at the begin of the tile, or of the span of it that is multiplied
    int64_t apart;         // elements from a tile to the next
    int64_t count;

    Neighbours from(Span span) const { return {first + span.begin * TILE, apart, count}; }
};

// How many: as many as leave the sums of so many rows in registers, but no more than bring something.
constexpr int64_t side_by_side(int64_t rows) {
    return std::max<int64_t>(1, std::min<int64_t>(4, ROWS_AT_ONCE / rows));
}

constexpr int COLUMNS = TILE / REGISTER_LANES;  // of registers, for the outputs of a tile

// The order in which the sums of a tile are added to: the one that leaves most of them in registers.
struct Place {
    int row, column;
};

template <int ROWS>
constexpr Place place(int number) {
#if defined(__AVX512F__)
    return {number / COLUMNS, number % COLUMNS};
#else
    return {number % ROWS, number / ROWS};
#endif
}

// sum + weights * x, for a piece of a line of weights and what meets it.
inline Register step(Register sum, const float* weights, const float* x) {
    return multiply_add(load_register(weights), broadcast(*x), sum);
}

inline Register step(Register sum, const bfloat16* weights, const bfloat16* x) {
    return multiply_add_pairs((Bits)load_register(weights), broadcast_word(x), sum);
}

// Weights that were widened: one input at a time, and the same sum.
inline Register step(Register sum, const float* weights, const bfloat16* x) {
    return multiply_add(load_register(weights), broadcast_half(x), sum);
}

inline Integers step(Integers sum, const uint8_t* weights, const int8_t* x) {
    return multiply_add_bytes((Bits)load_register(weights), broadcast_word(x), sum);
}

// `from` begins where the span does. W is T, or float for weights that were widened.
template <int ROWS, int TILES, int LINES, class T, class W>
void multiply_rows(const Tiled<T>& x, const Neighbours<W>& from, Span span, int64_t row, float (*to)[TILE],
                   const char* next) {
    Register sums[TILES][ROWS][COLUMNS] = {};
    for (int tile = 0; tile < TILES && span.begin > 0; ++tile) {
        for (int i = 0; i < ROWS; ++i) {
            for (int column = 0; column < COLUMNS; ++column) {
                sums[tile][i][column] = load_register(to[tile * MOST_ROWS + i] + column * REGISTER_LANES);
            }
        }
    }
    const W* weights = from.first;
    const T* rows[ROWS];
    for (int i = 0; i < ROWS; ++i) rows[i] = x.at(row + i, span.begin);
    for (int64_t piece = span.begin; piece < span.end; piece += PIECE<T>) {
#pragma GCC unroll 4
        for (int64_t k = 0; k < PIECE<T>; k += PAIR<W>) {
#pragma GCC unroll 4
            for (int tile = 0; tile < TILES; ++tile) {
                const W* const own = weights + tile * from.apart;
                fetch<LINES>(own, next + tile * from.apart * sizeof(W));
#pragma GCC unroll 24
                for (int n = 0; n < ROWS * COLUMNS; ++n) {
                    const auto [i, column] = place<ROWS>(n);
                    Register& sum = sums[tile][i][column];
                    sum = step(sum, own + column * REGISTER_LANES * PAIR<W>, rows[i] + k);
                }
            }
            weights += 2 * PIECE<W>;
            next += 64 * LINES;
        }
        for (int i = 0; i < ROWS; ++i) rows[i] += LANES * PIECE<T>;
    }
    for (int tile = 0; tile < TILES; ++tile) {
        for (int i = 0; i < ROWS; ++i) {
            for (int column = 0; column < COLUMNS; ++column) {
                store_register(to[tile * MOST_ROWS + i] + column * REGISTER_LANES, sums[tile][i][column]);
            }
        }
    }
}

// Adds a group's integers to the sums of a row, scaled.
inline void add_group(float* sums, const Integers* group, float scale) {
    for (int column = 0; column < COLUMNS; ++column) {
        float* const to = sums + column * REGISTER_LANES;
        const Register some = __builtin_convertvector(group[column], Register);
        store_register(to, multiply_add(some, broadcast(scale), load_register(to)));
    }
}

template <int ROWS, int TILES, int LINES>
void multiply_rows(const Packed8::Input& x, const Neighbours<uint8_t>& from, Span span, int64_t row,
                   float (*to)[TILE], const char* next) {
    for (int tile = 0; tile < TILES && span.begin == 0; ++tile) std::fill_n(to[tile * MOST_ROWS], ROWS * TILE, 0.0f);
    const uint8_t* weights = from.first;
    for (int64_t group = span.begin / GROUP; group < span.end / GROUP; ++group) {
        Integers sums[TILES][ROWS][COLUMNS];
        for (int tile = 0; tile < TILES; ++tile) {
            for (int i = 0; i < ROWS; ++i) {
                const int32_t correction = x.corrections[x.index(row + i, group)];
                for (Integers& sum : sums[tile][i]) sum = broadcast(correction);
            }
        }
        for (int64_t piece = group * GROUP; piece < (group + 1) * GROUP; piece += PIECE<int8_t>) {
            const int8_t* rows[ROWS];
            for (int i = 0; i < ROWS; ++i) rows[i] = x.values.at(row + i, piece);
#pragma GCC unroll 4
            for (int64_t k = 0; k < PIECE<int8_t>; k += PAIR<int8_t>) {
#pragma GCC unroll 4
                for (int tile = 0; tile < TILES; ++tile) {
                    const uint8_t* const own = weights + tile * from.apart;
                    fetch<LINES>(own, next + tile * from.apart);
#pragma GCC unroll 24
                    for (int n = 0; n < ROWS * COLUMNS; ++n) {
                        const auto [i, column] = place<ROWS>(n);
                        Integers& sum = sums[tile][i][column];
                        sum = step(sum, own + column * REGISTER_LANES * PAIR<int8_t>, rows[i] + k);
                    }
                }
                weights += 2 * PIECE<int8_t>;
                next += 64 * LINES;
            }
        }
        for (int tile = 0; tile < TILES; ++tile) {
            for (int i = 0; i < ROWS; ++i) {
                const float scale = x.scales[x.index(row + i, group)];
                add_group(to[tile * MOST_ROWS + i], sums[tile][i], scale);
            }
        }
    }
}

// By the number of rows; of one tile, or of as many as there may be side by side. Sums are [TILES][MOST_ROWS][TILE].
template <class Input, class Element, bool SIDE_BY_SIDE, int LINES, int... COUNT>
constexpr auto multiply_by_rows(std::integer_sequence<int, COUNT...>) {
    using Multiply = void (*)(const Input&, const Neighbours<Element>&, Span, int64_t, float (*)[TILE], const char*);
    return std::array<Multiply, sizeof...(COUNT)>{
        multiply_rows<COUNT + 1, SIDE_BY_SIDE ? side_by_side(COUNT + 1) : 1, LINES>...};
}

constexpr int64_t FEW_ROWS = 3;  // meet a tile faster than it comes: what is near is fetched better than what is far
static_assert(sizeof(Sums) == sizeof(float[MOST_ROWS][TILE]), "sums of several tiles lie one behind the other");

// The rows in parts of about equal size; with several tiles, in one. `next`, which may be null, is fetched by the only
// part, or by the first two, half of it each.
template <class Input, class Element>
void multiply_vectors(const Input& x, const Neighbours<Element>& tiles, Span span, int64_t row, int64_t count,
                      Sums* sums, const Element* next) {
    constexpr auto COUNTS = std::make_integer_sequence<int, ROWS_AT_ONCE>();
    static constexpr auto several = multiply_by_rows<Input, Element, true, 0>(COUNTS);
    static constexpr std::array<decltype(several), 3> alone = {
        multiply_by_rows<Input, Element, false, 0>(COUNTS),
        multiply_by_rows<Input, Element, false, 1>(COUNTS),
        multiply_by_rows<Input, Element, false, 2>(COUNTS),
    };
    const int64_t parts = ceil_div(count, ROWS_AT_ONCE);
    const int64_t half = (span.end - span.begin) * TILE / 2;
    for (int64_t part = 0; part < parts; ++part) {
        const int64_t begin = part * count / parts, end = (part + 1) * count / parts;
        const bool near = next == nullptr || tiles.count > 1 || count <= FEW_ROWS || part > 1;
        const int lines = near ? 0 : parts == 1 ? 2 : 1;
        const Element* const fetched = lines == 0 ? tiles.first : next + part * half;
        const auto& by_rows = tiles.count > 1 ? several : alone[lines];
        by_rows[end - begin - 1](x, tiles.from(span), span, row + begin, sums->at + begin, (const char*)fetched);
    }
}

constexpr int64_t ROWS_TO_WIDEN_FOR = 32;
constexpr int64_t WIDENED = 1024;  // inputs of a tile at a time, which stay in the second cache

// Whether that is ever done: not with AVX-512, whose registers meet so many rows at once that it brings nothing, and whose
// products of bfloat16 have an order of their own.
template <class Element>
constexpr bool WIDENS = sizeof(Element) == 2 && REGISTER_BYTES < 64;

// multiply_vectors for one tile and many rows of bfloat16: each weight becomes a float once, and not for every ROWS_AT_ONCE
// rows anew. The sums are the same. The first rows fetch `next`, unless it is null: a line for every input is all of it.
template <class T>
void multiply_widened(const Tiled<T>& x, const T* tile, Span span, int64_t row, int64_t count, Sums& sums,
                      const T* next) {
    constexpr auto COUNTS = std::make_integer_sequence<int, ROWS_AT_ONCE>();
    static constexpr auto by_rows = multiply_by_rows<Tiled<T>, float, false, 0>(COUNTS);
    static constexpr auto fetching = multiply_by_rows<Tiled<T>, float, false, 1>(COUNTS);
    thread_local Scratch scratch;
    float* const wide = scratch.get<float>(WIDENED * TILE);
    for (int64_t begin = span.begin; begin < span.end; begin += WIDENED) {
        const Span some = {begin, std::min(begin + WIDENED, span.end)};
        for (int64_t i = 0; i < some.end - begin; i += 2) {
            for (int column = 0; column < TILE; column += REGISTER_LANES) {
                const Bits pairs = (Bits)load_register(tile + (begin + i) * TILE + 2 * column);
                store_register(wide + i * TILE + column, (Register)(pairs << 16));
                store_register(wide + (i + 1) * TILE + column, (Register)(pairs & 0xffff0000u));
            }
        }
        for (int64_t done = 0; done < count; done += ROWS_AT_ONCE) {
            const int64_t rows = std::min<int64_t>(ROWS_AT_ONCE, count - done);
            const T* const fetched = next && done == 0 ? next + begin * TILE : nullptr;
            const auto& multiply = fetched ? fetching : by_rows;
            multiply[rows - 1](x, {wide, 0, 1}, some, row + done, sums.at + done, (const char*)fetched);
        }
    }
}

// ---- The matrix unit ----

#ifdef AMX
constexpr int64_t STEP = 2 * 16 * 64;  // bytes of weights that meet one tile of activations

// Calls use(i) for i in [0, COUNT), as a constant.
template <class Use, int... I>
inline void unrolled(std::integer_sequence<int, I...>, const Use& use) {
    (use(std::integral_constant<int, I>()), ...);
}

template <int COUNT, class Use>
inline void unrolled(const Use& use) {
    unrolled(std::make_integer_sequence<int, COUNT>(), use);
}

// Of the eight tiles, 2 b and 2 b + 1 hold the sums of block b of 16 rows with the left and the right half of a tile of
// weights, and the last one such a half. Rows are kept for the second half where there is room.
constexpr int WEIGHTS = 7;

template <int BLOCKS>
constexpr int rows_tile(int block) {
    return BLOCKS <= 2 ? 4 + block : 6;
}

// Lines [FIRST, LAST) of the next step of weights. Tile loads do not wake the prefetcher of the memory, and wait for their
// lines one after the other.
template <int FIRST, int LAST>
inline void fetch_lines(const char* weights) {
#pragma GCC unroll 32
    for (int line = FIRST; line < LAST; ++line) asm volatile("prefetcht0 %0" ::"m"(weights[STEP + 64 * line]));
}

// One step: blocks of rows, `apart` from each other, times a tile of weights. Where in between the fetches stand decides
// how much of the memory's speed is left; this order is the best of many that were measured.
template <int BLOCKS, class T>
inline void multiply_step(const T* rows, int64_t apart, const char* weights) {
    unrolled<2 * BLOCKS>([&](auto i) {
        constexpr int HALF = i / BLOCKS, BLOCK = i % BLOCKS, ROWS = rows_tile<BLOCKS>(BLOCK);
        if constexpr (BLOCKS <= 2 && HALF == 1 && BLOCK == 0) fetch_lines<16, 32>(weights);
        if constexpr (BLOCK == 0) load_tile<WEIGHTS>(weights + 64 * HALF, 2 * 64);
        if constexpr (BLOCKS <= 2 && i == 0) {
            fetch_lines<0, 16>(weights);
            unrolled<BLOCKS>([&](auto j) { load_tile<rows_tile<BLOCKS>(j)>(rows + j * apart, 64); });
        }
        if constexpr (BLOCKS > 2) {
            fetch_lines<32 * i / (2 * BLOCKS), 32 * (i + 1) / (2 * BLOCKS)>(weights);
            load_tile<ROWS>(rows + BLOCK * apart, 64);
        }
        if constexpr (sizeof(T) == 2) {
            multiply_bfloat16_tiles<2 * BLOCK + HALF, ROWS, WEIGHTS>();
        } else {
            multiply_int8_tiles<2 * BLOCK + HALF, ROWS, WEIGHTS>();
        }
    });
}

// Steps [begin, end); T are the elements of the rows. The sums go on from `from`, which may be null, to `to`:
// [rows][TILE] of 4 bytes.
template <int BLOCKS, class T>
void multiply_steps(const Tiled<T>& x, int64_t row, const void* weights, int64_t begin, int64_t end, const void* from,
                    void* to) {
    constexpr int64_t ROW = TILE * 4;
    unrolled<2 * BLOCKS>([&](auto i) {
        if (from) {
            load_tile<i>((const char*)from + i / 2 * LANES * ROW + i % 2 * 64, ROW);
        } else {
            clear_tile<i>();
        }
    });
    for (int64_t piece = begin; piece < end; ++piece) {
        multiply_step<BLOCKS>(x.tile(row / LANES, piece), LANES * x.size, (const char*)weights + piece * STEP);
    }
    unrolled<2 * BLOCKS>([&](auto i) { store_tile<i>((char*)to + i / 2 * LANES * ROW + i % 2 * 64, ROW); });
}

template <int BLOCKS>
void multiply_tiles(const Tiled<bfloat16>& x, const bfloat16* weights, Span span, int64_t row, int64_t, Sums& sums) {
    multiply_steps<BLOCKS>(x, row, weights, span.begin / 32, span.end / 32, span.begin ? sums.at : nullptr, sums.at);
}

template <int BLOCKS>
void multiply_tiles(const Packed8::Input& x, const uint8_t* weights, Span span, int64_t row, int64_t count,
                    Sums& sums) {
    alignas(64) int32_t products[BLOCKS * LANES][TILE];
    if (span.begin == 0) std::fill_n(sums.at[0], count * TILE, 0.0f);
    for (int64_t group = span.begin / GROUP; group < span.end / GROUP; ++group) {
        multiply_steps<BLOCKS>(x.values, row, weights, group * GROUP / 64, (group + 1) * GROUP / 64, nullptr, products);
        for (int64_t i = 0; i < count; ++i) {
            const int64_t index = x.index(row + i, group);
            const Integers correction = broadcast(x.corrections[index]);
            const Integers group[] = {(Integers)load_register(products[i]) + correction,
                                      (Integers)load_register(products[i] + LANES) + correction};
            add_group(sums.at[i], group, x.scales[index]);
        }
    }
}

// By the number of blocks of rows.
template <class Input, class Element, int... BLOCKS>
constexpr auto multiply_by_blocks(std::integer_sequence<int, BLOCKS...>) {
    using Multiply = void (*)(const Input&, const Element*, Span, int64_t, int64_t, Sums&);
    return std::array<Multiply, sizeof...(BLOCKS)>{multiply_tiles<BLOCKS + 1>...};
}
#endif

// Whether a product of these goes through the matrix unit: for every number of rows, or their sums would differ.
template <class Element>
bool by_tiles() {
    return sizeof(Element) < 4 && has_tiles();
}

// Rows [row, row + count) times one tile of weights, or, on vectors, side_by_side(count) of them. `row` is a multiple of
// 16; `next` is the tile that comes after them, or null.
template <class Input, class Element>
void multiply(const Input& x, const Neighbours<Element>& tiles, Span span, int64_t row, int64_t count, Sums* sums,
              const Element* next) {
#ifdef AMX
    if constexpr (sizeof(Element) < 4) {
        if (by_tiles<Element>()) {
            constexpr auto BLOCKS = std::make_integer_sequence<int, MOST_ROWS / LANES>();
            static constexpr auto by_blocks = multiply_by_blocks<Input, Element>(BLOCKS);
            return by_blocks[(count - 1) / LANES](x, tiles.first, span, row, count, *sums);
        }
    }
#endif
    if constexpr (WIDENS<Element>) {
        if (count >= ROWS_TO_WIDEN_FOR) return multiply_widened(x, tiles.first, span, row, count, *sums, next);
    }
    multiply_vectors(x, tiles, span, row, count, sums, next);
}

// ---- Whole products ----

constexpr int64_t CACHED = 1 << 19;  // bytes of weights that stay in the second cache while all rows pass
constexpr int64_t MOST_TILES = 8;    // of those weights, since their sums want room too
constexpr int64_t NEAREST = 512;     // bytes of a row that stay in the first while those weights pass
constexpr int64_t TURNS = 2;         // of every thread, at least, if it walks tiles side by side

template <class T>
void scale(Sums&, int64_t, const Packed<T>&, int64_t) {}

inline void scale(Sums& sums, int64_t count, const Packed8& weights, int64_t tile) {
    const Floats left = load(weights.scales + tile * TILE), right = load(weights.scales + tile * TILE + LANES);
    for (int64_t i = 0; i < count; ++i) {
        store(sums.at[i], load(sums.at[i]) * left);
        store(sums.at[i] + LANES, load(sums.at[i] + LANES) * right);
    }
}

// Multiplies by MATRICES matrices that are stored as one, their tiles in turn; a bundle is a tile of each. Calls
// use(first output of the bundle, row, sums[MATRICES]) for every bundle and row. Called by all threads of a team, which
// share the bundles and leave together.
template <int MATRICES, class Weights, class Use>
void linear(const typename Weights::Input& x, const Weights& weights, int64_t rows, const Use& use) {
    using Element = typename Weights::Element;
    if (rows == 0) return;  // a step may sample nothing
    const int64_t inputs = Weights::padded(weights.inputs), tile_bytes = inputs * TILE * sizeof(Element);
    const int64_t bundles = ceil_div(weights.outputs, TILE * MATRICES);
    const bool many = rows > 2 * MOST_ROWS;
    const int64_t rows_at_once = many ? 2 * LANES : MOST_ROWS;
    // Rows that do not fit beside the weights anyway are read less often by more weights at a time.
    const int64_t cached = rows * inputs * (int64_t)sizeof(Element) > 2 * CACHED ? 2 * CACHED : CACHED;
    const int64_t most = std::min<int64_t>(cached / tile_bytes, MOST_TILES) / MATRICES;
    // Each thread should have some turns, or they would end far apart.
    const int64_t most_beside = by_tiles<Element>() ? 1 : side_by_side(rows);
    const int64_t beside = bundles >= TURNS * most_beside * omp_get_num_threads() ? most_beside : 1;
    const int64_t per_turn = many ? std::max<int64_t>(1, most) : beside;  // bundles
    const int64_t at_once = many && by_tiles<Element>() ? NEAREST / sizeof(Element) : inputs;
    thread_local Scratch scratch;
    Sums(*const sums)[MATRICES] = (Sums(*)[MATRICES])scratch.get<Sums>(per_turn * MATRICES);
    const Tiles tiles;
    constexpr int64_t NOTHING = -1;
    // The turn of the bundles from `begin`; the one from `next` comes after it.
    const auto compute = [&](int64_t begin, int64_t next) {
        const int64_t end = std::min(begin + per_turn, bundles);
        const auto after = [&](int64_t index) -> const Element* {
            const int64_t tile = index < end * MATRICES ? index : next * MATRICES;
            return many || tile < 0 ? nullptr : weights.tile(tile);
        };
        for (int64_t row = 0; row < rows; row += rows_at_once) {
            const int64_t count = std::min(rows_at_once, rows - row);
            const bool last = row + rows_at_once >= rows;
            for (int64_t input = 0; input < inputs; input += at_once) {
                const Span span = {input, std::min(input + at_once, inputs)};
                for (int64_t index = begin * MATRICES; index < end * MATRICES;) {
                    const int64_t tiles = index + beside <= end * MATRICES ? beside : 1;
                    const Neighbours<Element> neighbours = {weights.tile(index), inputs * TILE, tiles};
                    Sums* const own = sums[0] + (index - begin * MATRICES);
                    index += tiles;
                    multiply(x, neighbours, span, row, count, own, last ? after(index) : nullptr);
                }
            }
            for (int64_t index = begin; index < end; ++index) {
                Sums* const own = sums[index - begin];
                for (int i = 0; i < MATRICES; ++i) scale(own[i], count, weights, index * MATRICES + i);
                for (int64_t i = 0; i < count; ++i) {
                    const float* parts[MATRICES];
                    for (int j = 0; j < MATRICES; ++j) parts[j] = own[j].at[i];
                    use(index * MATRICES * TILE, row + i, parts);
                }
            }
        }
    };
    // A thread takes its next turn before it begins with the one that it holds.
    int64_t held = NOTHING;
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t begin = 0; begin < bundles; begin += per_turn) {
        if (held != NOTHING) compute(held, begin);
        held = begin;
    }
    if (held != NOTHING) compute(held, NOTHING);
#pragma omp barrier
}

}  // namespace
