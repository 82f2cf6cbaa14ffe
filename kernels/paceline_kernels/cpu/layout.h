// How the decoder keeps its numbers in memory. Every layout is built of pieces of 64 bytes, which are a cache line, a
// vector, and a row of a matrix unit's tile; the same on every machine. T is float or bfloat16, of which two that meet
// in one step of a dot product lie side by side: a pair. In a layout, "pair" means 1 float or 2 bfloat16.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <new>
#include <type_traits>

#include "vec.h"

struct bfloat16 {
    uint16_t bits;
};

// A bfloat16 that takes the room of a float, so that nobody has to widen it.
struct WideHalf {
    float value;
};

// An 8-bit integer that takes the room of 16, likewise. Of four, those at even places stand before those at odd ones.
struct WideByte {
    int16_t value;
};

// What meets weights T, and weights of 8 bits.
template <class T>
using Activation = std::conditional_t<std::is_same_v<T, bfloat16> && HALVES_WIDE, WideHalf, T>;
using ByteActivation = std::conditional_t<BYTES_WIDE, WideByte, int8_t>;

template <class T>
constexpr int PAIR = 4 / sizeof(T);  // elements of 4 bytes
template <class T>
constexpr int PIECE = 64 / sizeof(T);  // elements of 64 bytes

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

// ---- Elements ----

inline float to_float(float x) { return x; }
inline float to_float(bfloat16 x) {
    const uint32_t bits = (uint32_t)x.bits << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}
inline float to_float(WideHalf x) { return x.value; }

// To the nearest, ties to even; a NaN stays one.
inline uint16_t upper_half(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if (x != x) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

template <class T>
T from_float(float x);
template <>
inline float from_float<float>(float x) {
    return x;
}
template <>
inline bfloat16 from_float<bfloat16>(float x) {
    return {upper_half(x)};
}
template <>
inline WideHalf from_float<WideHalf>(float x) {
    return {to_float(bfloat16{upper_half(x)})};
}

// To another kind that has the same values.
template <class From, class To>
inline void convert(From from, To& to) {
    to = from_float<To>(to_float(from));
}
template <class T>
inline void convert(T from, T& to) {
    to = from;
}

typedef uint16_t Halves __attribute__((vector_size(32)));

// LANES elements.
inline Floats load(const float* from) {
    Floats x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

inline Floats load(const bfloat16* from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)from)), 16);
#else
    Halves x;
    std::memcpy(&x, from, sizeof x);
    return (Floats)(__builtin_convertvector(x, Words) << 16);
#endif
}

inline Floats load(const WideHalf* from) { return load(&from->value); }

inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

// upper_half of each lane.
inline Words upper_halves(Floats x) {
    return by_registers<Words>(
        [](auto x) {
            const Bits bits = (Bits)x, nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
            return x == x ? nearest : (bits >> 16) | 0x40;
        },
        x);
}

inline void store(WideHalf* to, Floats x) { store(&to->value, (Floats)(upper_halves(x) << 16)); }

inline void store(bfloat16* to, Floats x) {
    const Words half = upper_halves(x);
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)half));
#else
    const Halves halves = __builtin_convertvector(half, Halves);
    std::memcpy(to, &halves, sizeof halves);
#endif
}

// Of magnitude below 128.
inline void store(int8_t* to, Ints x) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)x));
#else
    for (int lane = 0; lane < LANES; ++lane) to[lane] = (int8_t)x[lane];
#endif
}

inline void store(WideByte* to, Ints x) {
    for (int lane = 0; lane < LANES; ++lane) to[lane].value = (int16_t)x[(lane & ~3) | (lane & 1) << 1 | (lane >> 1 & 1)];
}

// `count` elements, at most LANES, and zeros behind them.
template <class T>
inline Floats load_some(const T* from, int64_t count) {
    if (count >= LANES) return load(from);
    T some[LANES] = {};
    std::copy_n(from, count, some);
    return load(some);
}

template <class T>
inline void store_some(T* to, Floats x, int64_t count) {
    if (count >= LANES) return store(to, x);
    T some[LANES];
    store(some, x);
    std::copy_n(some, count, to);
}

// ---- Activations ----

// A matrix [rows, size] in tiles of some rows and one piece: [rows / height][size / PIECE][height][PIECE]. What meets
// weights together lies in one tile, each row right behind the one before: so one address serves them all, and they do
// not meet in the same few sets of a cache. The size is padded to whole pieces; the padding must hold zeros, since it
// meets the zeros that pad the weights.
template <class T>
struct Tiled {
    T* data;
    int64_t size;  // padded
    int64_t height;

    static int64_t padded(int64_t size) { return round_up(size, PIECE<T>); }
    // With what a matrix unit reads behind the last of a few rows: of the last piece as many as of a whole tile.
    static int64_t elements(int64_t rows, int64_t size, int64_t height) {
        return round_up(rows, height) * padded(size) + std::max<int64_t>(0, LANES - height) * PIECE<T>;
    }

    // Of the tile that begins at row height * block and column PIECE * piece.
    T* tile(int64_t block, int64_t piece) const { return data + (block * size + piece * PIECE<T>)*height; }

    // Behind it stand the columns of the same piece.
    T* at(int64_t row, int64_t column) const {
        // Mostly there is one block, and divisions take time.
        const int64_t block = row < height ? 0 : (uint32_t)row / (uint32_t)height;
        return tile(block, column / PIECE<T>) + (row - block * height) * PIECE<T> + column % PIECE<T>;
    }
};

// Sums of float32 [rows, size] in stripes of 32 columns, [size / 32][rows][32]: what a tile of weights gives lies in one
// piece. A matrix of rows would spread it over as many pages as there are rows.
struct Striped {
    static constexpr int64_t WIDTH = 32;

    float* data;
    int64_t rows;

    static int64_t elements(int64_t rows, int64_t size) { return rows * round_up(size, WIDTH); }

    // Behind it stand the columns of the same stripe.
    float* at(int64_t row, int64_t column) const {
        return data + (column / WIDTH * rows + row) * WIDTH + column % WIDTH;
    }

    void read(int64_t row, int64_t column, int64_t count, float* to) const {
        while (count > 0) {
            const int64_t some = std::min(count, WIDTH - column % WIDTH);
            std::copy_n(at(row, column), some, to);
            column += some;
            count -= some;
            to += some;
        }
    }
};

// As numpy has them.
struct RowMajor {
    float* data;
    int64_t size;

    float* at(int64_t row, int64_t column) const { return data + row * size + column; }
};

// ---- Keys and values ----

// The pages of one layer. A block holds each KV head's positions in groups of 16, lane p % 16 of a group for position p
// of the block; a last group that is not full has lanes that nobody uses. So a position's lane follows from the
// position alone, if the block size is a multiple of 16 or the block is the only group.
//
//     keys    [blocks][kv_heads][groups][head_dim / pair][16][pair]    a vector: one pair of dimensions of 16 positions
//     values  [blocks][kv_heads][groups][16 / pair][head_dim][pair]    a vector: 16 dimensions of one pair of positions
//
// head_dim is even. Both are what a matrix unit takes as its second factor.
struct Pages {
    int64_t block_size, num_kv_heads, head_dim;

    int64_t groups() const { return ceil_div(block_size, LANES); }
    int64_t group_elements() const { return LANES * head_dim; }
    int64_t head_elements() const { return groups() * group_elements(); }  // of one head in a block
    int64_t block_elements() const { return num_kv_heads * head_elements(); }

    // Where the group begins that holds offset `offset` of a block, in keys and in values alike.
    int64_t group(int64_t block, int64_t kv_head, int64_t offset) const {
        return block * block_elements() + kv_head * head_elements() + offset / LANES * group_elements();
    }

    // One position of one head: key and value [head_dim]. No other position's bytes are read or written.
    template <class T>
    void write(T* keys, T* values, int64_t block, int64_t offset, int64_t kv_head, const T* key, const T* value) const {
        T* const k = keys + group(block, kv_head, offset) + offset % LANES * PAIR<T>;
        T* const v = values + group(block, kv_head, offset) + offset % LANES / PAIR<T> * head_dim * PAIR<T> +
                     offset % PAIR<T>;
        for (int64_t d = 0; d < head_dim; d += PAIR<T>) std::memcpy(k + d * LANES, key + d, sizeof(T) * PAIR<T>);
        for (int64_t d = 0; d < head_dim; ++d) v[d * PAIR<T>] = value[d];
    }
};

// ---- The batch ----

// Runs of rows of several sequences, one after the other; `PagedBatch` in Python says the rest.
struct Batch {
    int64_t num_seqs, max_blocks;
    const int32_t* query_starts;  // [num_seqs + 1]
    const int32_t* context_lens;  // [num_seqs]
    const int32_t* block_tables;  // [num_seqs, max_blocks]
};

// ---- Memory ----

// Memory of one thread or of one model: grows, never shrinks, aligned to cache lines.
class Scratch {
public:
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() { std::free(data_); }

    // What it holds is lost when it grows.
    template <class T>
    T* get(int64_t elements) {
        const size_t wanted = round_up(elements * sizeof(T), 64);
        if (wanted > size_) {
            std::free(data_);
            size_ = wanted + wanted / 4 / 64 * 64;
            data_ = std::aligned_alloc(64, size_);
            if (data_ == nullptr) throw std::bad_alloc();
        }
        return static_cast<T*>(data_);
    }

private:
    void* data_ = nullptr;
    size_t size_ = 0;
};

// Memory that begins as zeros, again whenever its layout changes, and whose padding therefore stays so as long as nobody
// writes there.
template <class T>
class Zeroed {
public:
    T* get(int64_t elements, int64_t layout = 0) {
        if (elements > size_ || layout != layout_) {
            size_ = elements;
            layout_ = layout;
            data_ = scratch_.get<T>(elements);
            if (elements) std::memset((void*)data_, 0, elements * sizeof(T));
        }
        return data_;
    }

private:
    Scratch scratch_;
    T* data_ = nullptr;
    int64_t size_ = 0, layout_ = 0;
};
