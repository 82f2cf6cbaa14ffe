// Rows of activations times packed weights. An output element has one accumulation order, whatever rows stand beside
// its own and however many threads there are: from the first input to the last, or as the matrix unit adds up a tile,
// tile after tile. So a token's numbers do not depend on the batch that it is computed in.
#pragma once

#include <array>
#include <utility>

#include "amx.h"
#include "layout.h"

namespace {

constexpr int64_t TILE = 2 * LANES;       // outputs of one tile of weights
constexpr int64_t MOST_ROWS = 2 * LANES;  // that meet a tile at once

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

constexpr int64_t AHEAD = 1024;  // bytes from what is multiplied to what is fetched from memory

inline void fetch(const void* from) { __builtin_prefetch((const char*)from + AHEAD); }

inline Words load_words(const void* from) {
    Words x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

inline uint32_t load_word(const void* from) {
    uint32_t x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

inline Floats step(Floats sum, const float* weights, const float* x) { return fused(load(weights), all(*x), sum); }

inline Floats step(Floats sum, const bfloat16* weights, const bfloat16* x) {
    const Words w = load_words(weights), pair = Words{} + load_word(x);
#ifdef __AVX512BF16__
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512i)w, (__m512bh)(__m512i)pair);
#else
    sum = fused((Floats)(w << 16), (Floats)(pair << 16), sum);
    return fused((Floats)(w & 0xffff0000u), (Floats)(pair & 0xffff0000u), sum);
#endif
}

inline Ints step(Ints sum, const uint8_t* weights, const int8_t* x) {
    const Words w = load_words(weights);
#ifdef __AVX512VNNI__
    return (Ints)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)(Words{} + load_word(x)));
#else
    for (int i = 0; i < 4; ++i) sum += (Ints)((w >> (8 * i)) & 0xffu) * (int32_t)x[i];
    return sum;
#endif
}

template <int ROWS, class T>
void multiply_rows(const Tiled<T>& x, const T* weights, Span span, int64_t row, float (*sums)[TILE]) {
    Floats left[ROWS] = {}, right[ROWS] = {};
    for (int i = 0; i < ROWS && span.begin > 0; ++i) {
        left[i] = load(sums[i]);
        right[i] = load(sums[i] + LANES);
    }
    weights += span.begin * TILE;
    const T* rows[ROWS];
    for (int i = 0; i < ROWS; ++i) rows[i] = x.at(row + i, span.begin);
    for (int64_t piece = span.begin; piece < span.end; piece += PIECE<T>) {
#pragma GCC unroll 4
        for (int64_t k = 0; k < PIECE<T>; k += PAIR<T>) {
            fetch(weights);
            fetch(weights + PIECE<T>);
#pragma GCC unroll 12
            for (int i = 0; i < ROWS; ++i) {
                left[i] = step(left[i], weights, rows[i] + k);
                right[i] = step(right[i], weights + PIECE<T>, rows[i] + k);
            }
            weights += 2 * PIECE<T>;
        }
        for (int i = 0; i < ROWS; ++i) rows[i] += LANES * PIECE<T>;
    }
    for (int i = 0; i < ROWS; ++i) {
        store(sums[i], left[i]);
        store(sums[i] + LANES, right[i]);
    }
}

// Adds a group's integers to the sums of a row, scaled.
inline void add_group(float* sums, Ints left, Ints right, float scale) {
    store(sums, fused(__builtin_convertvector(left, Floats), all(scale), load(sums)));
    store(sums + LANES, fused(__builtin_convertvector(right, Floats), all(scale), load(sums + LANES)));
}

template <int ROWS>
void multiply_rows(const Packed8::Input& x, const uint8_t* weights, Span span, int64_t row, float (*sums)[TILE]) {
    if (span.begin == 0) std::fill_n(sums[0], ROWS * TILE, 0.0f);
    weights += span.begin * TILE;
    for (int64_t group = span.begin / GROUP; group < span.end / GROUP; ++group) {
        Ints left[ROWS], right[ROWS];
        for (int i = 0; i < ROWS; ++i) left[i] = right[i] = Ints{} + x.corrections[x.index(row + i, group)];
        for (int64_t k = group * GROUP; k < (group + 1) * GROUP; k += 4) {
            fetch(weights);
            fetch(weights + 64);
#pragma GCC unroll 12
            for (int i = 0; i < ROWS; ++i) {
                const int8_t* const values = x.values.at(row + i, k);
                left[i] = step(left[i], weights, values);
                right[i] = step(right[i], weights + 64, values);
            }
            weights += 2 * 64;
        }
        for (int i = 0; i < ROWS; ++i) add_group(sums[i], left[i], right[i], x.scales[x.index(row + i, group)]);
    }
}

template <class Input, class Element, int... COUNT>
constexpr auto multiply_by_rows(std::integer_sequence<int, COUNT...>) {
    using Multiply = void (*)(const Input&, const Element*, Span, int64_t, float (*)[TILE]);
    return std::array<Multiply, sizeof...(COUNT)>{multiply_rows<COUNT + 1>...};
}

// The rows in parts of about equal size.
template <class Input, class Element>
void multiply_vectors(const Input& x, const Element* weights, Span span, int64_t row, int64_t count, Sums& sums) {
    static constexpr auto by_rows = multiply_by_rows<Input, Element>(std::make_integer_sequence<int, ROWS_AT_ONCE>());
    const int64_t parts = ceil_div(count, ROWS_AT_ONCE);
    for (int64_t part = 0; part < parts; ++part) {
        const int64_t begin = part * count / parts, end = (part + 1) * count / parts;
        by_rows[end - begin - 1](x, weights, span, row + begin, sums.at + begin);
    }
}

// ---- The matrix unit ----

#ifdef AMX
constexpr int64_t STEP = 2 * 16 * 64;  // bytes of weights that meet one tile of activations

// Tile loads do not wake the prefetcher of the memory, and wait for their lines one after the other.
template <int FIRST>
inline void fetch_half_step(const char* weights) {
#pragma GCC unroll 16
    for (int line = FIRST; line < FIRST + 16; ++line) asm volatile("prefetcht0 %0" ::"m"(weights[STEP + 64 * line]));
}

// Tiles 0 and 1 += tile 6, rows at `x`, times tiles 4 and 5, a step of weights; 2 and 3 those of `more`, 16 rows on.
template <int BLOCKS, class T>
inline void multiply_step(const T* x, const T* more, const char* weights) {
    _tile_loadd(4, weights, 2 * 64);
    fetch_half_step<0>(weights);
    _tile_loadd(6, x, 64);
    if constexpr (BLOCKS == 2) _tile_loadd(7, more, 64);
    if constexpr (sizeof(T) == 2) {
        _tile_dpbf16ps(0, 6, 4);
        if constexpr (BLOCKS == 2) _tile_dpbf16ps(2, 7, 4);
    } else {
        _tile_dpbsud(0, 6, 4);
        if constexpr (BLOCKS == 2) _tile_dpbsud(2, 7, 4);
    }
    fetch_half_step<16>(weights);
    _tile_loadd(5, weights + 64, 2 * 64);
    if constexpr (sizeof(T) == 2) {
        _tile_dpbf16ps(1, 6, 5);
        if constexpr (BLOCKS == 2) _tile_dpbf16ps(3, 7, 5);
    } else {
        _tile_dpbsud(1, 6, 5);
        if constexpr (BLOCKS == 2) _tile_dpbsud(3, 7, 5);
    }
}

constexpr int64_t SUMS_ROW = TILE * 4;  // bytes

template <int BLOCKS>
inline void clear_tiles() {
    _tile_zero(0);
    _tile_zero(1);
    if constexpr (BLOCKS == 2) {
        _tile_zero(2);
        _tile_zero(3);
    }
}

template <int BLOCKS>
inline void load_tiles(const float (*from)[TILE]) {
    _tile_loadd(0, from, SUMS_ROW);
    _tile_loadd(1, from[0] + LANES, SUMS_ROW);
    if constexpr (BLOCKS == 2) {
        _tile_loadd(2, from + LANES, SUMS_ROW);
        _tile_loadd(3, from[LANES] + LANES, SUMS_ROW);
    }
}

template <int BLOCKS, class Number>
inline void store_tiles(Number (*to)[TILE]) {
    _tile_stored(0, to, SUMS_ROW);
    _tile_stored(1, to[0] + LANES, SUMS_ROW);
    if constexpr (BLOCKS == 2) {
        _tile_stored(2, to + LANES, SUMS_ROW);
        _tile_stored(3, to[LANES] + LANES, SUMS_ROW);
    }
}

template <int BLOCKS>
void multiply_tiles(const Tiled<bfloat16>& x, const bfloat16* weights, Span span, int64_t row, int64_t, Sums& sums) {
    if (span.begin == 0) {
        clear_tiles<BLOCKS>();
    } else {
        load_tiles<BLOCKS>(sums.at);
    }
    for (int64_t piece = span.begin / 32; piece < span.end / 32; ++piece) {
        const bfloat16* const rows = x.tile(row / LANES, piece);
        multiply_step<BLOCKS>(rows, rows + LANES * x.size, (const char*)weights + piece * STEP);
    }
    store_tiles<BLOCKS>(sums.at);
}

template <int BLOCKS>
void multiply_tiles(const Packed8::Input& x, const uint8_t* weights, Span span, int64_t row, int64_t count,
                    Sums& sums) {
    alignas(64) int32_t products[BLOCKS * LANES][TILE];
    if (span.begin == 0) std::fill_n(sums.at[0], count * TILE, 0.0f);
    for (int64_t group = span.begin / GROUP; group < span.end / GROUP; ++group) {
        clear_tiles<BLOCKS>();
        for (int64_t piece = group * GROUP / 64; piece < (group + 1) * GROUP / 64; ++piece) {
            const int8_t* const rows = x.values.tile(row / LANES, piece);
            multiply_step<BLOCKS>(rows, rows + LANES * x.values.size, (const char*)weights + piece * STEP);
        }
        store_tiles<BLOCKS>(products);
        for (int64_t i = 0; i < count; ++i) {
            const int64_t index = x.index(row + i, group);
            const Ints correction = Ints{} + x.corrections[index];
            add_group(sums.at[i], (Ints)load_words(products[i]) + correction,
                      (Ints)load_words(products[i] + LANES) + correction, x.scales[index]);
        }
    }
}
#endif

// Whether a product of these goes through the matrix unit: for every number of rows, or their sums would differ.
template <class Element>
bool by_tiles() {
    return sizeof(Element) < 4 && has_tiles();
}

// Rows [row, row + count) times one tile of weights; row is a multiple of 16.
template <class Input, class Element>
void multiply(const Input& x, const Element* weights, Span span, int64_t row, int64_t count, Sums& sums) {
#ifdef AMX
    if constexpr (sizeof(Element) < 4) {
        if (by_tiles<Element>()) {
            if (count > LANES) return multiply_tiles<2>(x, weights, span, row, count, sums);
            return multiply_tiles<1>(x, weights, span, row, count, sums);
        }
    }
#endif
    multiply_vectors(x, weights, span, row, count, sums);
}

// ---- Whole products ----

constexpr int64_t CACHED = 1 << 19;  // bytes of weights that stay in the second cache while all rows pass
constexpr int64_t MOST_TILES = 8;    // of those weights, since their sums want room too
constexpr int64_t NEAREST = 512;     // bytes of a row that stay in the first while those weights pass

template <class T>
void scale(Sums&, int64_t, const Packed<T>&, int64_t) {}

inline void scale(Sums& sums, int64_t count, const Packed8& weights, int64_t tile) {
    const Floats left = load(weights.scales + tile * TILE), right = load(weights.scales + tile * TILE + LANES);
    for (int64_t i = 0; i < count; ++i) {
        store(sums.at[i], load(sums.at[i]) * left);
        store(sums.at[i] + LANES, load(sums.at[i] + LANES) * right);
    }
}

// Calls use(first output, row, sums[TOGETHER]) for every row and every TOGETHER tiles side by side, which begin at that
// output. Called by all threads of a team, which share the tiles and leave together.
template <int TOGETHER, class Weights, class Use>
void linear(const typename Weights::Input& x, const Weights& weights, int64_t rows, const Use& use) {
    using Element = typename Weights::Element;
    const int64_t inputs = Weights::padded(weights.inputs), tile_bytes = inputs * TILE * sizeof(Element);
    const int64_t all_tiles = ceil_div(weights.outputs, TILE * TOGETHER);
    const bool many = rows > MOST_ROWS;
    // Rows that do not fit beside the weights anyway are read less often by more weights at a time.
    const int64_t cached = rows * inputs * (int64_t)sizeof(Element) > 2 * CACHED ? 2 * CACHED : CACHED;
    const int64_t most = std::min<int64_t>(cached / tile_bytes, MOST_TILES) / TOGETHER;
    const int64_t together = many ? std::max<int64_t>(1, most) : 1;
    const int64_t at_once = many && by_tiles<Element>() ? NEAREST / sizeof(Element) : inputs;
    thread_local Scratch scratch;
    Sums(*const sums)[TOGETHER] = (Sums(*)[TOGETHER])scratch.get<Sums>(together * TOGETHER);
    const Tiles tiles;
#pragma omp for schedule(dynamic, 1)
    for (int64_t begin = 0; begin < all_tiles; begin += together) {
        const int64_t end = std::min(begin + together, all_tiles);
        for (int64_t row = 0; row < rows; row += MOST_ROWS) {
            const int64_t count = std::min(MOST_ROWS, rows - row);
            for (int64_t input = 0; input < inputs; input += at_once) {
                const Span span = {input, std::min(input + at_once, inputs)};
                for (int64_t index = begin * TOGETHER; index < end * TOGETHER; ++index) {
                    multiply(x, weights.tile(index), span, row, count, sums[0][index - begin * TOGETHER]);
                }
            }
            for (int64_t index = begin; index < end; ++index) {
                Sums* const own = sums[index - begin];
                for (int i = 0; i < TOGETHER; ++i) scale(own[i], count, weights, index * TOGETHER + i);
                for (int64_t i = 0; i < count; ++i) {
                    const float* parts[TOGETHER];
                    for (int j = 0; j < TOGETHER; ++j) parts[j] = own[j].at[i];
                    use(index * TOGETHER * TILE, row + i, parts);
                }
            }
        }
    }
}

}  // namespace
