// The decoder's operations with one accumulation order per output element, whatever else is computed beside it.
//
// Everywhere the lanes of a vector are rows (or queries): a lane never meets another one, so an element's bits depend
// on its own row alone, and the number of rows, their places and the number of threads cannot show. Sums over the
// inner dimension run from its first element to its last. Shared by fp32 and bf16; sums are fp32 in both.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#ifdef __x86_64__
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(__linux__)
#define AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif
#include <omp.h>

namespace {

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
constexpr int AT_ONCE = 8;  // independent sums that hide the latency of an FMA

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));

struct bfloat16 {
    uint16_t bits;
};

// ---- Vectors ----

inline Floats all(float x) { return x - Floats{}; }

inline Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// Relative error below 3e-7 for x <= 0; 0 below -87, where exp underflows; flat above 88. NaN stays NaN.
inline Floats exp(Floats x) {
    const Floats clipped = x > 88.0f ? all(88.0f) : x < -87.0f ? all(-87.0f) : x;
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const Floats turns = fma(clipped, all(1.44269504f), all(shift)) - shift;
    // ln 2 in two parts, the first of few bits: turns times it is exact.
    const Floats rest = fma(turns, all(2.12194440e-4f), fma(turns, all(-0.693359375f), clipped));
    Floats series = all(1.0f / 5040);
    for (float coefficient : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 1.0f / 2, 1.0f, 1.0f}) {
        series = fma(series, rest, all(coefficient));
    }
    const Ints exponent = (__builtin_convertvector(turns, Ints) + 127) << 23;
    const Floats result = series * (Floats)exponent;
    return x < -87.0f ? Floats{} : result;
}

// In place: lane j of vector i changes places with lane i of vector j. Pairs of 2 x 2 squares of growing sides.
template <int SIDE, int... J>
inline void exchange(Floats& a, Floats& b, std::integer_sequence<int, J...>) {
    const Floats first = a, second = b;
#ifdef __clang__
    a = __builtin_shufflevector(first, second, (J & SIDE ? LANES + J - SIDE : J)...);
    b = __builtin_shufflevector(first, second, (J & SIDE ? LANES + J : J + SIDE)...);
#else
    a = __builtin_shuffle(first, second, Ints{(J & SIDE ? LANES + J - SIDE : J)...});
    b = __builtin_shuffle(first, second, Ints{(J & SIDE ? LANES + J : J + SIDE)...});
#endif
}

template <int SIDE = 1>
inline void transpose(Floats square[LANES]) {
#pragma GCC unroll 16
    for (int i = 0; i < LANES; ++i) {
        if (!(i & SIDE)) exchange<SIDE>(square[i], square[i + SIDE], std::make_integer_sequence<int, LANES>());
    }
    if constexpr (SIDE * 2 < LANES) transpose<SIDE * 2>(square);
}

// ---- Elements in memory ----

inline Floats load(const float* from) {
    Floats x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

inline Floats load(const bfloat16* from) {
    Halves x;
    std::memcpy(&x, from, sizeof x);
    return (Floats)(__builtin_convertvector(x, Words) << 16);
}

inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

// To the nearest, ties to even; a NaN stays one.
inline Words upper_half(Floats x) {
    const Words bits = (Words)x;
    const Words nearest = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return x == x ? nearest : (bits >> 16) | 0x40;
}

inline void store(bfloat16* to, Floats x) {
    const Halves halves = __builtin_convertvector(upper_half(x), Halves);
    std::memcpy(to, &halves, sizeof halves);
}

// `count` elements and zeros, where a row does not fill a vector.
template <class T>
inline Floats load(const T* from, int64_t count) {
    if (count >= LANES) return load(from);
    T some[LANES] = {};
    std::copy_n(from, count, some);
    return load(some);
}

template <class T>
inline void store(T* to, Floats x, int64_t count) {
    if (count >= LANES) return store(to, x);
    T some[LANES];
    store(some, x);
    std::copy_n(some, count, to);
}

// As it would come back from memory.
template <class T>
inline Floats rounded(Floats x);
template <>
inline Floats rounded<float>(Floats x) {
    return x;
}
template <>
inline Floats rounded<bfloat16>(Floats x) {
    return (Floats)(upper_half(x) << 16);
}

// Memory of this thread, kept from call to call. Several at once: by slot.
Floats* scratch(int slot, int64_t vectors) {
    thread_local std::vector<Floats> kept[2];
    if (kept[slot].size() < (size_t)vectors) kept[slot].resize(vectors);
    return kept[slot].data();
}

constexpr int64_t WORTH_THREADS = 1 << 15;  // elements; below, waking a thread costs more than it does

// ---- linear ----

// What one step along the inner dimension takes from a row: a float, or two neighbouring bfloat16.
struct Pair {
    bfloat16 low, high;
};

inline Floats step(Floats sum, const float* weight, Floats x) { return fma(all(*weight), x, sum); }

inline Floats step(Floats sum, const Pair* weight, Floats x) {
    uint32_t bits;
    std::memcpy(&bits, weight, sizeof bits);
    const Words pair = Words{} + bits;
#ifdef __AVX512BF16__
    return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512)pair, (__m512bh)(__m512)x);
#else
    sum = fma((Floats)(pair << 16), (Floats)((Words)x << 16), sum);
    return fma((Floats)(pair & 0xffff0000u), (Floats)((Words)x & 0xffff0000u), sum);
#endif
}

// Dot products of AT_ONCE weight rows with the rows in the lanes of PANELS panels [steps] -> sums[panel][weight row].
template <int PANELS, class Step>
inline void dot(const Step* const weights[AT_ONCE], const Floats* x, int64_t panel_size, int64_t steps,
                Floats* sums, int64_t sums_size) {
    Floats kept[PANELS][AT_ONCE] = {};
    for (int64_t k = 0; k < steps; ++k) {
#pragma GCC unroll 2
        for (int p = 0; p < PANELS; ++p) {
            const Floats lanes = x[p * panel_size + k];
#pragma GCC unroll 8
            for (int i = 0; i < AT_ONCE; ++i) kept[p][i] = step(kept[p][i], weights[i] + k, lanes);
        }
    }
    for (int p = 0; p < PANELS; ++p) {
        for (int i = 0; i < AT_ONCE; ++i) sums[p * sums_size + i] = kept[p][i];
    }
}

// Rows [first, first + LANES) of x [rows, steps] as a panel [steps]: vector k holds step k of every row, 0 for none.
template <class Step>
void pack(const Step* x, int64_t rows, int64_t steps, int64_t first, int64_t k, Floats* panel) {
    const int64_t count = std::min<int64_t>(LANES, steps - k);
    Floats square[LANES] = {};
    for (int i = 0; i < std::min<int64_t>(LANES, rows - first); ++i) {
        square[i] = load((const float*)(x + (first + i) * steps + k), count);
    }
    transpose(square);
    std::copy_n(square, count, panel + k);
}

// The rows of LANES outputs, and beyond the last output that one again, not kept.
template <int PANELS, class Step>
void square_dots(const Floats* x, const Step* weight, int64_t steps, int64_t outputs, int64_t first_output,
                 Floats squares[PANELS][LANES]) {
    for (int begin = 0; begin < LANES; begin += AT_ONCE) {
        const Step* weights[AT_ONCE];
        for (int i = 0; i < AT_ONCE; ++i) {
            weights[i] = weight + std::min(first_output + begin + i, outputs - 1) * steps;
        }
        dot<PANELS>(weights, x, steps, steps, squares[0] + begin, LANES);
    }
}

#ifdef AMX
// Whether the kernel lets this process use the matrix unit.
bool has_tiles() {
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    static const bool permitted = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return permitted;
}

// While it lives, the tiles of this thread are 16 rows of 64 bytes.
struct Tiles {
    Tiles() {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16};
        } config;
        _tile_loadconfig(&config);
    }
    ~Tiles() { _tile_release(); }
};

// As above, for bfloat16: weights [output][pair] times a panel [pair][row], which is just what the unit multiplies.
template <int PANELS>
void tile_dots(const Floats* x, const Pair* weight, int64_t steps, int64_t outputs, int64_t first_output,
               Floats squares[PANELS][LANES]) {
    const int64_t width = std::min<int64_t>(LANES, outputs - first_output);
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t k = 0; k < steps; k += LANES) {
        const int64_t count = std::min<int64_t>(LANES, steps - k);
        const Pair* rows = weight + first_output * steps + k;
        const bool whole = count == LANES;
        Floats edge[LANES], panel_edge[PANELS][LANES];  // zeros around what there is
        if (!whole || width < LANES) {
            std::fill_n(edge, LANES, Floats{});
            for (int64_t i = 0; i < width; ++i) std::memcpy(&edge[i], rows + i * steps, count * sizeof(Pair));
        }
        if (!whole) {
            std::fill_n(panel_edge[0], PANELS * LANES, Floats{});
            for (int p = 0; p < PANELS; ++p) std::copy_n(x + p * steps + k, count, panel_edge[p]);
        }
        asm volatile("" ::: "memory");  // the intrinsics do not say that they read it
        if (!whole || width < LANES) {
            _tile_loadd(2, edge, sizeof(Floats));
        } else {
            _tile_loadd(2, rows, steps * sizeof(Pair));
        }
        _tile_loadd(3, whole ? x + k : panel_edge[0], sizeof(Floats));
        _tile_dpbf16ps(0, 2, 3);
        if constexpr (PANELS == 2) {
            _tile_loadd(3, whole ? x + steps + k : panel_edge[1], sizeof(Floats));
            _tile_dpbf16ps(1, 2, 3);
        }
    }
    _tile_stored(0, squares[0], sizeof(Floats));
    if constexpr (PANELS == 2) _tile_stored(1, squares[1], sizeof(Floats));
    asm volatile("" ::: "memory");
}

template <int PANELS>
void square_dots(const Floats* x, const Pair* weight, int64_t steps, int64_t outputs, int64_t first_output,
                 Floats squares[PANELS][LANES]) {
    if (has_tiles()) {
        const Tiles tiles;
        tile_dots<PANELS>(x, weight, steps, outputs, first_output, squares);
    } else {
        square_dots<PANELS, Pair>(x, weight, steps, outputs, first_output, squares);
    }
}
#endif

// Outputs [first_output, first_output + LANES) of the rows of PANELS panels.
template <int PANELS, class T, class Step>
void linear_block(T* out, const Floats* x, const Step* weight, const T* bias, int64_t rows, int64_t steps,
                  int64_t outputs, int64_t first_row, int64_t first_output) {
    const int64_t width = std::min<int64_t>(LANES, outputs - first_output);
    Floats squares[PANELS][LANES];
    square_dots<PANELS>(x, weight, steps, outputs, first_output, squares);
    const Floats added = bias ? load(bias + first_output, width) : Floats{};
    for (int p = 0; p < PANELS; ++p) {
        transpose(squares[p]);
        const int64_t begin = first_row + p * LANES;
        for (int64_t i = 0; i < std::min<int64_t>(LANES, rows - begin); ++i) {
            store(out + (begin + i) * outputs + first_output, bias ? squares[p][i] + added : squares[p][i], width);
        }
    }
}

// out [rows, outputs] = x [rows, steps] times weight [outputs, steps] transposed, plus bias.
template <class T, class Step>
void linear(T* out, const Step* x, const Step* weight, const T* bias, int64_t rows, int64_t steps, int64_t outputs) {
    const int64_t panels = (rows + LANES - 1) / LANES;
    const int64_t squares = (steps + LANES - 1) / LANES;
    Floats* const packed = scratch(0, panels * steps);
    const bool parallel = rows * steps * outputs > WORTH_THREADS;
    // Weights of a stripe stay in the cache while all rows pass; with few of them, threads need more to share.
    const int64_t stripe = outputs >= 8 * 64 * omp_get_max_threads() ? 64 : LANES;
#pragma omp parallel if (parallel)
    {
#pragma omp for collapse(2) schedule(static)
        for (int64_t panel = 0; panel < panels; ++panel) {
            for (int64_t square = 0; square < squares; ++square) {
                pack(x, rows, steps, panel * LANES, square * LANES, packed + panel * steps);
            }
        }
#pragma omp for schedule(static)
        for (int64_t begin = 0; begin < outputs; begin += stripe) {
            for (int64_t panel = 0; panel < panels; panel += 2) {
                for (int64_t output = begin; output < std::min(begin + stripe, outputs); output += LANES) {
                    const auto block = panel + 1 < panels ? linear_block<2, T, Step> : linear_block<1, T, Step>;
                    block(out, packed + panel * steps, weight, bias, rows, steps, outputs, panel * LANES, output);
                }
            }
        }
    }
}

// ---- Elementwise ----

// x [rows, size] over its root mean square, rounded, times weight [size].
template <class T>
void rms_norm(T* out, const T* x, const T* weight, int64_t rows, int64_t size, float eps) {
#pragma omp parallel for if (rows * size > WORTH_THREADS)
    for (int64_t row = 0; row < rows; ++row) {
        const T* from = x + row * size;
        Floats squares = {};
        for (int64_t i = 0; i < size; i += LANES) {
            const Floats part = load(from + i, size - i);
            squares = fma(part, part, squares);
        }
        float sum = 0;
        for (int i = 0; i < LANES; ++i) sum += squares[i];
        const float scale = 1.0f / std::sqrt(sum / size + eps);
        for (int64_t i = 0; i < size; i += LANES) {
            const Floats normed = rounded<T>(load(from + i, size - i) * scale);
            store(out + row * size + i, load(weight + i, size - i) * normed, size - i);
        }
    }
}

// x [num_tokens, heads, 2 * half], tokens `stride` apart, turned by cos and sin [num_tokens, half].
template <class T>
void rotary(T* out, const T* x, const T* cos, const T* sin, int64_t tokens, int64_t heads, int64_t half,
            int64_t stride) {
#pragma omp parallel for if (tokens * heads * half > WORTH_THREADS)
    for (int64_t token = 0; token < tokens; ++token) {
        for (int64_t head = 0; head < heads; ++head) {
            const T* from = x + token * stride + head * 2 * half;
            T* to = out + (token * heads + head) * 2 * half;
            for (int64_t i = 0; i < half; i += LANES) {
                const int64_t count = half - i;
                const Floats low = load(from + i, count), high = load(from + half + i, count);
                const Floats c = load(cos + token * half + i, count), s = load(sin + token * half + i, count);
                store(to + i, rounded<T>(low * c) - rounded<T>(high * s), count);
                store(to + half + i, rounded<T>(high * c) + rounded<T>(low * s), count);
            }
        }
    }
}

// out [rows, size] from gate_up [rows, 2 * size].
template <class T>
void silu_mul(T* out, const T* gate_up, int64_t rows, int64_t size) {
#pragma omp parallel for if (rows * size > WORTH_THREADS)
    for (int64_t row = 0; row < rows; ++row) {
        const T* from = gate_up + row * 2 * size;
        for (int64_t i = 0; i < size; i += LANES) {
            const Floats gate = load(from + i, size - i), up = load(from + size + i, size - i);
            const Floats silu = rounded<T>(gate / (exp(-gate) + 1.0f));
            store(out + row * size + i, silu * up, size - i);
        }
    }
}

// ---- Attention ----

constexpr int PIECE = 32;  // rows of one run that are computed together
constexpr int BLOCK = 64;  // positions between two corrections of the softmax; a multiple of AT_ONCE

struct Shape {
    int64_t block_size, max_blocks, num_heads, num_kv_heads, head_dim;
    float scale;
};

// Consecutive rows of one sequence. The first of them sees `visible` positions, each next one more.
struct Piece {
    int64_t first_row, rows, visible;
    const int32_t* blocks;
};

// The softmax of LANES queries, as far as it has come (Milakov and Gimelshein, 2018).
struct Softmax {
    Floats largest, total;
    Ints visible;  // positions that each query sees
};

// `count` positions from `begin` of one KV head as floats [BLOCK, width], zeros behind head_dim.
template <class T>
void gather(float* out, const T* cache, const Piece& piece, const Shape& shape, int64_t kv_head, int64_t begin,
            int64_t count, int64_t width) {
    for (int64_t i = 0; i < count; ++i) {
        const int64_t position = begin + i;
        const int64_t slot = piece.blocks[position / shape.block_size] * shape.block_size + position % shape.block_size;
        const T* from = cache + (slot * shape.num_kv_heads + kv_head) * shape.head_dim;
        for (int64_t d = 0; d < width; d += LANES) {
            store(out + i * width + d, load(from + d, shape.head_dim - d), width - d);
        }
    }
}

// Adds values [count, width], weighted, to sums [width], corrected first. Queries that do not see a position skip it,
// whatever it holds.
template <bool MASKED>
void weigh(Floats* sums, const float* values, const Floats* weights, Floats correction, Ints visible, int64_t begin,
           int64_t count, int64_t width) {
    for (int64_t d = 0; d < width; d += AT_ONCE) {
        Floats kept[AT_ONCE];
#pragma GCC unroll 8
        for (int i = 0; i < AT_ONCE; ++i) kept[i] = sums[d + i] * correction;
        for (int64_t p = 0; p < count; ++p) {
            const Floats weight = weights[p];
#pragma GCC unroll 8
            for (int i = 0; i < AT_ONCE; ++i) {
                const Floats next = fma(all(values[p * width + d + i]), weight, kept[i]);
                kept[i] = MASKED ? (visible > (int32_t)(begin + p) ? next : kept[i]) : next;
            }
        }
#pragma GCC unroll 8
        for (int i = 0; i < AT_ONCE; ++i) sums[d + i] = kept[i];
    }
}

// One block of positions for one vector of queries [width]; advances state and sums [width].
void attend(Softmax& state, Floats* sums, const Floats* queries, const float* keys, const float* values,
            int64_t begin, int64_t count, int64_t width, bool masked, float scale) {
    Floats weights[BLOCK];
    Floats largest = state.largest;
    for (int64_t p = 0; p < count; p += AT_ONCE) {
        const float* rows[AT_ONCE];
        for (int i = 0; i < AT_ONCE; ++i) rows[i] = keys + std::min<int64_t>(p + i, count - 1) * width;
        dot<1>(rows, queries, width, width, weights + p, AT_ONCE);
    }
    for (int64_t p = 0; p < count; ++p) {
        const Floats score = weights[p] * scale;
        weights[p] = state.visible > (int32_t)(begin + p) ? score : all(-INFINITY);
        largest = weights[p] > largest ? weights[p] : largest;
    }
    const Floats correction = exp(state.largest - largest);
    Floats total = state.total * correction;
    for (int64_t p = 0; p < count; ++p) {
        weights[p] = exp(weights[p] - largest);
        total += weights[p];
    }
    state.largest = largest;
    state.total = total;
    (masked ? weigh<true> : weigh<false>)(sums, values, weights, correction, state.visible, begin, count, width);
}

// All query heads of one KV head for the rows of a piece; query i is head i % sharing of row i / sharing.
template <class T>
void attend_piece(T* out, const T* query, const T* key_cache, const T* value_cache, const Shape& shape,
                  const Piece& piece, int64_t kv_head) {
    const int64_t sharing = shape.num_heads / shape.num_kv_heads;
    const int64_t queries = piece.rows * sharing, groups = (queries + LANES - 1) / LANES;
    const int64_t width = (shape.head_dim + AT_ONCE - 1) / AT_ONCE * AT_ONCE;
    const int64_t context = piece.visible + piece.rows - 1;
    auto offset = [&](int64_t i) {
        return ((piece.first_row + i / sharing) * shape.num_heads + kv_head * sharing + i % sharing) * shape.head_dim;
    };
    Floats* const packed = scratch(1, 2 * groups * width + 2 * BLOCK * width / LANES);
    Floats* const sums = packed + groups * width;
    float* const keys = (float*)(sums + groups * width);
    float* const values = keys + BLOCK * width;
    std::fill_n(packed, 2 * groups * width, Floats{});
    std::vector<Softmax> states(groups);
    for (int64_t group = 0; group < groups; ++group) {
        Softmax& state = states[group];
        state = {all(-INFINITY), Floats{}, Ints{} + 1};
        for (int64_t lane = 0; lane < std::min<int64_t>(LANES, queries - group * LANES); ++lane) {
            const int64_t i = group * LANES + lane;
            state.visible[lane] = piece.visible + i / sharing;
            for (int64_t d = 0; d < shape.head_dim; ++d) {
                packed[group * width + d][lane] = load(query + offset(i) + d, 1)[0];
            }
        }
    }
    for (int64_t begin = 0; begin < context; begin += BLOCK) {
        const int64_t count = std::min<int64_t>(BLOCK, context - begin);
        gather(keys, key_cache, piece, shape, kv_head, begin, count, width);
        gather(values, value_cache, piece, shape, kv_head, begin, count, width);
        for (int64_t group = 0; group < groups; ++group) {
            attend(states[group], sums + group * width, packed + group * width, keys, values, begin, count, width,
                   begin + count > piece.visible, shape.scale);
        }
    }
    for (int64_t i = 0; i < queries; ++i) {
        const int64_t group = i / LANES, lane = i % LANES;
        for (int64_t d = 0; d < shape.head_dim; ++d) {
            const float mean = sums[group * width + d][lane] / states[group].total[lane];
            store(out + offset(i) + d, all(mean), 1);
        }
    }
}

template <class T>
void paged_attention(T* out, const T* query, const T* key_cache, const T* value_cache, const int32_t* query_starts,
                     const int32_t* context_lens, const int32_t* block_tables, int64_t sequences, const Shape& shape) {
    std::vector<Piece> pieces;
    for (int64_t i = 0; i < sequences; ++i) {
        const int64_t end = query_starts[i + 1];
        for (int64_t row = query_starts[i]; row < end; row += PIECE) {
            const int64_t visible = context_lens[i] - (end - 1 - row);
            pieces.push_back({row, std::min<int64_t>(PIECE, end - row), visible, block_tables + i * shape.max_blocks});
        }
    }
#pragma omp parallel for collapse(2) schedule(dynamic)
    for (size_t i = 0; i < pieces.size(); ++i) {
        for (int64_t kv_head = 0; kv_head < shape.num_kv_heads; ++kv_head) {
            attend_piece(out, query, key_cache, value_cache, shape, pieces[i], kv_head);
        }
    }
}

}  // namespace

// Elements are bfloat16 if `bf16`, else float. Tensors are contiguous unless a stride is given.
extern "C" {

void paceline_linear(bool bf16, void* out, const void* x, const void* weight, const void* bias, int64_t rows,
                     int64_t inner, int64_t outputs) {
    if (bf16) {
        linear((bfloat16*)out, (const Pair*)x, (const Pair*)weight, (const bfloat16*)bias, rows, inner / 2, outputs);
    } else {
        linear((float*)out, (const float*)x, (const float*)weight, (const float*)bias, rows, inner, outputs);
    }
}

void paceline_rms_norm(bool bf16, void* out, const void* x, const void* weight, int64_t rows, int64_t size,
                       float eps) {
    if (bf16) {
        rms_norm((bfloat16*)out, (const bfloat16*)x, (const bfloat16*)weight, rows, size, eps);
    } else {
        rms_norm((float*)out, (const float*)x, (const float*)weight, rows, size, eps);
    }
}

void paceline_rotary(bool bf16, void* out, const void* x, const void* cos, const void* sin, int64_t tokens,
                     int64_t heads, int64_t half, int64_t stride) {
    if (bf16) {
        rotary((bfloat16*)out, (const bfloat16*)x, (const bfloat16*)cos, (const bfloat16*)sin, tokens, heads, half,
               stride);
    } else {
        rotary((float*)out, (const float*)x, (const float*)cos, (const float*)sin, tokens, heads, half, stride);
    }
}

void paceline_silu_mul(bool bf16, void* out, const void* gate_up, int64_t rows, int64_t size) {
    if (bf16) {
        silu_mul((bfloat16*)out, (const bfloat16*)gate_up, rows, size);
    } else {
        silu_mul((float*)out, (const float*)gate_up, rows, size);
    }
}

void paceline_paged_attention(bool bf16, void* out, const void* query, const void* keys, const void* values,
                              const int32_t* query_starts, const int32_t* context_lens, const int32_t* block_tables,
                              int64_t sequences, int64_t max_blocks, int64_t block_size, int64_t num_heads,
                              int64_t num_kv_heads, int64_t head_dim, float scale) {
    const Shape shape = {block_size, max_blocks, num_heads, num_kv_heads, head_dim, scale};
    if (bf16) {
        paged_attention((bfloat16*)out, (const bfloat16*)query, (const bfloat16*)keys, (const bfloat16*)values,
                        query_starts, context_lens, block_tables, sequences, shape);
    } else {
        paged_attention((float*)out, (const float*)query, (const float*)keys, (const float*)values, query_starts,
                        context_lens, block_tables, sequences, shape);
    }
}
}
