// Rows of activations times packed weights. An output element has one accumulation order, whatever rows stand beside
// its own and however many threads there are: from the first input to the last, or as the matrix unit adds up a tile,
// tile after tile. So a token's numbers do not depend on the batch that it is computed in.
#pragma once

#include <array>
#include <utility>

#include "amx.h"
#include "factors.h"
#include "fetch.h"
#include "team.h"

namespace {

constexpr int64_t TILE = 2 * LANES;       // outputs of one tile of weights
constexpr int64_t MOST_ROWS = 3 * LANES;  // that meet a tile at once

// Whether a product of these goes through the matrix unit: for every number of rows, or their sums would differ.
template <class Element>
bool by_tiles() {
    return sizeof(Element) < 4 && has_tiles();
}

// So many rows meet each tile of weights in one or two blocks, one tile after the other.
inline bool few_blocks(int64_t rows) { return rows <= 2 * MOST_ROWS; }

// How many of so many rows lie in a tile of activations: those that meet weights of these elements at once, in blocks of
// about equal size, since the next tile of weights is fetched during the last one; or what a tile of the matrix unit takes.
template <class Element>
int64_t tile_height(int64_t rows) {
    if (by_tiles<Element>()) return std::clamp<int64_t>(rows, 1, LANES);
    if (!few_blocks(rows)) return 2 * LANES;
    return rows <= MOST_ROWS ? std::max<int64_t>(rows, 1) : round_up(ceil_div(rows, 2), LANES);
}

// ---- Operands ----

// Weights [outputs, inputs] in tiles of 32 outputs, one after the other, each [inputs / pair][32][pair]: a stream that
// is read once, from its begin to its end. Missing outputs and inputs are zeros.
template <class T>
struct Packed {
    using Element = T;
    using Input = Tiled<Activation<T>>;

    const T* data;
    int64_t outputs, inputs;
    bool streamed;  // gone from every cache before it is read again

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
    bool streamed;
    const float* scales;  // [outputs], padded to tiles

    static int64_t padded(int64_t inputs) { return round_up(inputs, GROUP); }
    static int64_t tile_elements(int64_t inputs) { return TILE * padded(inputs); }
    const uint8_t* tile(int64_t index) const { return data + index * tile_elements(inputs); }
};

// Activations of 8 bits: a scale for each row and group of inputs (as in Dettmers et al., "LLM.int8()", 2022, but for
// groups, so that an outlier costs its neighbours alone their precision).
struct Packed8::Input {
    Tiled<ByteActivation> values;
    int64_t rows;          // padded
    float* scales;         // [groups][rows]
    int32_t* corrections;  // likewise: minus OFFSET times the sum of the values

    int64_t groups() const { return values.size / GROUP; }
    int64_t index(int64_t row, int64_t group) const { return group * rows + row; }
};

// How activations lie that meet weights T, whose padding they share.
template <class T>
struct ActivationShape {
    int64_t size, height, elements, layout;

    ActivationShape(int64_t rows, int64_t inputs)
        : size(Tiled<T>::padded(inputs)),
          height(tile_height<T>(rows)),
          elements(Tiled<Activation<T>>::elements(rows, size, height)),
          layout(size == inputs ? 0 : height) {}
};

template <class T>
Tiled<Activation<T>> activations(Zeroed<Activation<T>>& memory, int64_t rows, int64_t inputs) {
    const ActivationShape<T> shape(rows, inputs);
    return {memory.get(shape.elements, shape.layout), shape.size, shape.height};
}

// The same in `Copies`, which `share_rows` fills.
template <class T>
class OwnActivations {
public:
    void reserve(int64_t rows, int64_t inputs, int64_t threads) {
        shape_ = {rows, inputs};
        copies_.reserve(rows, shape_.elements, threads, shape_.layout);
    }

    Tiled<Activation<T>> own() const { return {copies_.own(), shape_.size, shape_.height}; }

private:
    Copies<Activation<T>> copies_;
    ActivationShape<T> shape_{0, 0};
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

// Rows whose sums registers hold.
#if defined(__AVX512F__)
constexpr int ROWS_AT_ONCE = 12;
#else
constexpr int ROWS_AT_ONCE = 6;
#endif

constexpr int COLUMNS = TILE / REGISTER_LANES;  // of registers, for the outputs of a tile

// How many columns at a time leave the sums of so many rows in registers.
constexpr int columns_at_once(int rows) {
    int columns = COLUMNS;
    while (!fit(rows, columns)) columns /= 2;
    return columns;
}

// Bytes from what is multiplied to what is fetched into the first cache, if it is not the next tile; and where lines are
// asked for in turn, to what is fetched into the second one.
constexpr int64_t AHEAD = IN_TURN ? PAGE : 1024, FAR_AHEAD = STRETCH;

// Lines of the next tile that are fetched for every eight lines of weights; or else, with NEAR, what comes AHEAD and
// FAR_AHEAD of them, or with NOTHING, nothing, and with ONCE, neither: then caches need not keep the weights either.
constexpr int NOTHING = -1;
constexpr int ONCE = -2;
constexpr int NEAR = 0;
constexpr int ALL_LINES = 8;

// Called for every two lines of weights, which are number `index` of four. While a tile is multiplied out of the second
// cache, the next one comes there: so memory is read evenly, however many rows a tile meets. Without a next one, what is
// near is fetched. Returns what comes after it.
template <int LINES>
inline const char* fetch(const void* weights, const char* next, int index) {
    if constexpr (LINES == NOTHING || LINES == ONCE) {
        return next;
    } else if constexpr (LINES == NEAR) {
        if constexpr (IN_TURN) {
            const char* const far = in_turn((const char*)weights + FAR_AHEAD);
            __builtin_prefetch(far, 0, 2);
            __builtin_prefetch(far + NEXT_LINE, 0, 2);
        }
        const char* const near = (const char*)weights + AHEAD;
        __builtin_prefetch(near, 0, 3);
        __builtin_prefetch(near + 64, 0, 3);
        return next;
    } else {
        const int count = (index + 1) * LINES / 4 - index * LINES / 4;
        const char* const some = in_turn(next);
        for (int line = 0; line < count; ++line) __builtin_prefetch(some + line * NEXT_LINE, 0, 2);
        return next + 64 * count;
    }
}

// Some columns of a tile.
template <class W>
struct Columns {
    const W* weights;  // of what is multiplied next
    const char* next;  // to be fetched next, if something is
};

// Adds the products of so many inputs. Both go on as far: `first` with the rows' inputs, in one tile of x, and `from`.
template <int LINES, int ROWS, int WIDTH, class X, class W, class Sum>
inline void add_products(Sum (&sums)[ROWS][WIDTH], const Tiled<X>& x, int64_t inputs, const X*& first,
                         Columns<W>& from) {
    for (int64_t piece = 0; piece < inputs; piece += PIECE<X>) {
#pragma GCC unroll 1
        for (int64_t k = 0; k < PIECE<X>; k += 4 * PAIR<W>) {
#pragma GCC unroll 4
            for (int index = 0; index < 4; ++index) {
                from.next = fetch<LINES>(from.weights, from.next, index);
                const X* rows[ROWS];
                for (int i = 0; i < ROWS; ++i) rows[i] = first + i * PIECE<X>;
                const auto weights = [&](int column) { return from.weights + column * REGISTER_LANES * PAIR<W>; };
                step<W, LINES == ONCE>(sums, weights, rows, k + index * PAIR<W>);
                from.weights += 2 * PIECE<W>;
            }
        }
        first += x.height * PIECE<X>;
    }
}

// The sums of some columns, of which `to` is the first: those of a tile stand in [MOST_ROWS][TILE].
template <int ROWS, int WIDTH, int LINES, class X, class W>
void multiply_columns(const Tiled<X>& x, Columns<W> from, Span span, int64_t row, float* to) {
    const auto at = [to](int i, int column) { return to + i * TILE + column * REGISTER_LANES; };
    const bool goes_on = span.begin > 0;
    Register sums[ROWS][WIDTH];  // in registers, since all loops over them are unrolled
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; ++i) {
#pragma GCC unroll 8
        for (int column = 0; column < WIDTH; ++column) {
            sums[i][column] = goes_on ? load_register(at(i, column)) : Register{};
        }
    }
    const X* first = x.at(row, span.begin);
    add_products<LINES>(sums, x, span.end - span.begin, first, from);
#pragma GCC unroll 12
    for (int i = 0; i < ROWS; ++i) {
#pragma GCC unroll 8
        for (int column = 0; column < WIDTH; ++column) store_register(at(i, column), sums[i][column]);
    }
}

// Adds a group's integers to sums, scaled.
template <int WIDTH>
inline void add_group(float* sums, const Integers (&group)[WIDTH], float scale) {
#pragma GCC unroll 8
    for (int column = 0; column < WIDTH; ++column) {
        float* const to = sums + column * REGISTER_LANES;
        const Register some = __builtin_convertvector(group[column], Register);
        store_register(to, multiply_add(some, broadcast(scale), load_register(to)));
    }
}

template <int ROWS, int WIDTH, int LINES>
void multiply_columns(const Packed8::Input& x, Columns<uint8_t> from, Span span, int64_t row, float* to) {
    for (int i = 0; i < ROWS && span.begin == 0; ++i) std::fill_n(to + i * TILE, WIDTH * REGISTER_LANES, 0.0f);
    const ByteActivation* first = x.values.at(row, span.begin);
    for (int64_t group = span.begin / GROUP; group < span.end / GROUP; ++group) {
        const int32_t* const corrections = x.corrections + x.index(row, group);
        const float* const scales = x.scales + x.index(row, group);
        Integers sums[ROWS][WIDTH];
#pragma GCC unroll 12
        for (int i = 0; i < ROWS; ++i) {
            const Integers correction = broadcast(corrections[i]);
#pragma GCC unroll 8
            for (int column = 0; column < WIDTH; ++column) sums[i][column] = correction;
        }
        add_products<LINES>(sums, x.values, GROUP, first, from);
#pragma GCC unroll 12
        for (int i = 0; i < ROWS; ++i) add_group(to + i * TILE, sums[i], scales[i]);
    }
}

// All columns of a tile, which begins where the span does; some after the others if they are too many for the registers,
// each with lines to fetch as it takes them in turn.
template <int ROWS, int LINES, int FIRST = 0, class Input, class Element>
void multiply_rows(const Input& x, const Element* tile, Span span, int64_t row, float* to, const char* next) {
    constexpr int WIDTH = columns_at_once(ROWS);
    constexpr int64_t OUTPUT = FIRST * REGISTER_LANES;
    const Columns<Element> some = {tile + OUTPUT * PAIR<Element>, next};
    multiply_columns<ROWS, WIDTH, LINES>(x, some, span, row, to + OUTPUT);
    if constexpr (FIRST + WIDTH < COLUMNS) {
        if constexpr (LINES > 0) next += LINES * (span.end - span.begin) * TILE * (int64_t)sizeof(Element) / ALL_LINES;
        multiply_rows<ROWS, LINES, FIRST + WIDTH>(x, tile, span, row, to, next);
    }
}

// By the number of rows, from FIRST to LAST. Sums are [MOST_ROWS][TILE].
template <class Input, class Element, int LINES, int FIRST, int LAST>
class ByRows {
public:
    using Multiply = void (*)(const Input&, const Element*, Span, int64_t, float*, const char*);

    static Multiply of(int64_t rows) { return all_[rows - FIRST]; }

private:
    template <int... COUNT>
    static constexpr auto each(std::integer_sequence<int, COUNT...>) {
        return std::array<Multiply, sizeof...(COUNT)>{multiply_rows<FIRST + COUNT, LINES>...};
    }
    static constexpr auto all_ = each(std::make_integer_sequence<int, LAST - FIRST + 1>());
};

// So many rows meet a tile about as fast as it comes. What counts then is how memory is read, far along one stretch. CPUs
// do that best by themselves: instructions that fetch only hold them up. Where lines are asked for in turn, it is done best
// so, and more rows are few if no cache holds the weights.
#if defined(__AVX512F__)
constexpr int FEW_ROWS = 8, FEW_STREAMED = IN_TURN ? ROWS_AT_ONCE : FEW_ROWS;
#else
constexpr int FEW_ROWS = 2, FEW_STREAMED = FEW_ROWS;
#endif

// In how many parts so many rows meet a tile, and how often each of these walks along it; and in how many shares the next
// tile is fetched meanwhile: 1, 2 or 4.
constexpr int64_t parts_of(int64_t rows) { return ceil_div(rows, ROWS_AT_ONCE); }
constexpr int64_t walks_of(int64_t rows) { return COLUMNS / columns_at_once((int)ceil_div(rows, parts_of(rows))); }
constexpr int64_t shares_of(int64_t rows) {
    const int64_t walks = parts_of(rows) * walks_of(rows);
    return walks >= 4 ? 4 : walks >= 2 ? 2 : 1;
}

// Of what is fetched in so many shares, the fewest rows of a part.
constexpr int fewest_rows(int64_t shares) {
    int64_t rows = FEW_ROWS + 1;
    while (rows < MOST_ROWS && shares_of(rows) != shares) ++rows;
    return (int)(rows / parts_of(rows));
}

template <class Input, class Element, int SHARES>
using Fetching = ByRows<Input, Element, ALL_LINES / SHARES, fewest_rows(SHARES), ROWS_AT_ONCE>;

// The rows in parts of about equal size. `next`, which may be null and is if rows are few, is fetched in equal shares by the
// first of those times that the tile is walked along.
template <class Input, class Element>
void multiply_vectors(const Input& x, const Element* tile, Span span, int64_t row, int64_t count, Sums& sums,
                      const Element* next) {
    const int64_t parts = parts_of(count), walks = walks_of(count), shares = shares_of(count);
    const Element* const begin = tile + span.begin * TILE;
    // Of all parts, those that fetch: a share in each of their walks.
    const int64_t fetching = next == nullptr ? 0 : shares / walks;
    for (int64_t part = 0; part < parts; ++part) {
        const int64_t first = part * count / parts, rows = (part + 1) * count / parts - first;
        const bool fetches = part < fetching;
        const Element* const fetched = fetches ? next + part * (span.end - span.begin) * TILE / fetching : begin;
        const auto multiply = !fetches      ? ByRows<Input, Element, NEAR, 1, ROWS_AT_ONCE>::of(rows)
                              : shares == 4 ? Fetching<Input, Element, 4>::of(rows)
                              : shares == 2 ? Fetching<Input, Element, 2>::of(rows)
                                            : Fetching<Input, Element, 1>::of(rows);
        multiply(x, begin, span, row + first, sums.at[first], (const char*)fetched);
    }
}

// ---- The matrix unit ----

#ifdef TILES
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
            Integers sum[COLUMNS];
            for (int column = 0; column < COLUMNS; ++column) {
                sum[column] = (Integers)load_register(products[i] + column * REGISTER_LANES) + correction;
            }
            add_group(sums.at[i], sum, x.scales[index]);
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

// Rows [row, row + count) times one tile of weights. `row` is a multiple of 16; `next` is the tile that comes after it, or
// null.
template <class Input, class Element>
void multiply(const Input& x, const Element* tile, Span span, int64_t row, int64_t count, Sums& sums,
              const Element* next) {
#ifdef TILES
    if constexpr (sizeof(Element) < 4) {
        if (by_tiles<Element>()) {
            constexpr auto BLOCKS = std::make_integer_sequence<int, MOST_ROWS / LANES>();
            static constexpr auto by_blocks = multiply_by_blocks<Input, Element>(BLOCKS);
            return by_blocks[(count - 1) / LANES](x, tile, span, row, count, sums);
        }
    }
#endif
    multiply_vectors(x, tile, span, row, count, sums, next);
}

// ---- Whole products ----

constexpr int64_t CACHED = 1 << 19;  // bytes of weights that stay in the second cache while all rows pass
constexpr int64_t MOST_TILES = 8;    // of those weights, since their sums want room too
constexpr int64_t NEAREST = 512;     // bytes of a row that stay in the first while those weights pass
constexpr int64_t WALKED = 1 << 15;  // bytes of a tile that rows pass part by part, where those of bfloat16 are kept wide

template <class T>
void scale(Sums&, int64_t, const Packed<T>&, int64_t) {}

inline void scale(Sums& sums, int64_t count, const Packed8& weights, int64_t tile) {
    const Floats left = load(weights.scales + tile * TILE), right = load(weights.scales + tile * TILE + LANES);
    for (int64_t i = 0; i < count; ++i) {
        store(sums.at[i], load(sums.at[i]) * left);
        store(sums.at[i] + LANES, load(sums.at[i] + LANES) * right);
    }
}

// How many inputs are multiplied before the rows, their parts, or the tiles begin again.
template <class Element>
int64_t inputs_at_once(int64_t rows, int64_t inputs, bool many) {
    if (by_tiles<Element>()) return many ? NEAREST / sizeof(Element) : inputs;
    const bool again = rows > ROWS_AT_ONCE || columns_at_once((int)rows) < COLUMNS;
    return HALVES_WIDE && again ? WALKED / (TILE * (int64_t)sizeof(Element)) : inputs;
}

// The sums of `count` rows and a bundle, a tile of each of MATRICES matrices, go to whoever uses them.
template <int MATRICES, class Weights, class Use>
inline void use_bundle(const Weights& weights, int64_t bundle, int64_t row, int64_t count, Sums (&sums)[MATRICES],
                       const Use& use) {
    for (int i = 0; i < MATRICES; ++i) scale(sums[i], count, weights, bundle * MATRICES + i);
    for (int64_t i = 0; i < count; ++i) {
        const float* parts[MATRICES];
        for (int j = 0; j < MATRICES; ++j) parts[j] = sums[j].at[i];
        use(bundle * MATRICES * TILE, row + i, parts);
    }
}

// ---- Few rows ----

// Weights that pass the caches by (but on Intel's) share the first one with activations; from so many bytes of these on, an
// element of each row, loads like others are faster.
constexpr int64_t LEAST_KEPT = 10;

constexpr int64_t SMALL = 1 << 22;  // bytes of weights that are read before it pays to hand some to another thread

// Of so many bundles a thread has as many of its own, the same in every step: what fits the caches stays in that of the
// core that reads it (affinity scheduling; Markatos and LeBlanc, 1994). The last of many go to whoever is free.
inline int64_t own_share(int64_t bundles, int64_t bundle_bytes, int64_t threads) {
    return ceil_div(bundles * bundle_bytes > SMALL ? 7 * bundles / 8 : bundles, threads);
}

// `linear` for few rows.
template <int MATRICES, class Weights, class Use>
void linear_few(Team& team, const typename Weights::Input& x, const Weights& weights, int64_t rows, int64_t bundles,
                const Use& use) {
    using Input = typename Weights::Input;
    using Element = typename Weights::Element;
    constexpr int LINES = IN_TURN ? NEAR : ONCE;  // of weights that no cache holds
    const bool pays = LINES == NEAR || rows * (int64_t)sizeof(Element) < LEAST_KEPT;
    const auto multiply = weights.streamed && pays ? ByRows<Input, Element, LINES, 1, FEW_STREAMED>::of(rows)
                                                   : ByRows<Input, Element, NOTHING, 1, FEW_ROWS>::of(rows);
    const Span span = {0, Weights::padded(weights.inputs)};
    thread_local Sums sums[MATRICES];
    const auto compute = [&](int64_t bundle) {
        for (int i = 0; i < MATRICES; ++i) {
            multiply(x, weights.tile(bundle * MATRICES + i), span, 0, sums[i].at[0], nullptr);
        }
        use_bundle<MATRICES>(weights, bundle, 0, rows, sums, use);
    };
    const int64_t bundle_bytes = MATRICES * TILE * span.end * (int64_t)sizeof(Element);
    const int64_t threads = omp_get_num_threads(), own = own_share(bundles, bundle_bytes, threads);
    const int64_t begin = omp_get_thread_num() * own, end = std::min(begin + own, bundles);
    for (int64_t bundle = begin; bundle < end; ++bundle) compute(bundle);
    if (threads * own < bundles) {
#pragma omp for schedule(dynamic, 1) nowait
        for (int64_t bundle = threads * own; bundle < bundles; ++bundle) compute(bundle);
    }
    team.meet();
}

// ---- All products ----

// Multiplies by MATRICES matrices that are stored as one, their tiles in turn; a bundle is a tile of each. Calls
// use(first output of the bundle, row, sums[MATRICES]) for every bundle and row. Called by all threads of a team, which
// share the bundles and leave together.
template <int MATRICES, class Weights, class Use>
void linear(Team& team, const typename Weights::Input& x, const Weights& weights, int64_t rows, const Use& use) {
    using Element = typename Weights::Element;
    if (rows == 0) return;  // a step may sample nothing
    const int64_t inputs = Weights::padded(weights.inputs), tile_bytes = inputs * TILE * sizeof(Element);
    const int64_t bundles = ceil_div(weights.outputs, TILE * MATRICES);
    const int64_t few = weights.streamed ? FEW_STREAMED : FEW_ROWS;
    if (rows <= few && !by_tiles<Element>()) return linear_few<MATRICES>(team, x, weights, rows, bundles, use);
    const bool many = !few_blocks(rows);
    const int64_t rows_at_once = !by_tiles<Element>() ? tile_height<Element>(rows) : many ? 2 * LANES : MOST_ROWS;
    // Rows that do not fit beside the weights anyway are read less often by more weights at a time.
    const int64_t cached = rows * inputs * (int64_t)sizeof(Element) > 2 * CACHED ? 2 * CACHED : CACHED;
    const int64_t most = std::min<int64_t>(cached / tile_bytes, MOST_TILES) / MATRICES;
    const int64_t per_turn = many ? std::max<int64_t>(1, most) : 1;  // bundles
    const int64_t at_once = inputs_at_once<Element>(rows, inputs, many);
    // Each thread's own from call to call, and never cleared: the first inputs of a turn overwrite what is there, and `use`
    // must not multiply itself, for it reads them.
    thread_local Scratch scratch;
    Sums(*const sums)[MATRICES] = (Sums(*)[MATRICES])scratch.get<Sums>(per_turn * MATRICES);
    const Tiles tiles;
    constexpr int64_t NONE = -1;
    // The turn of the bundles from `begin`; the one from `next` comes after it.
    const auto compute = [&](int64_t begin, int64_t next) {
        const int64_t end = std::min(begin + per_turn, bundles);
        // What comes after a span of the tile before `index`: of its own or, if inputs are cut, of its place in the next turn.
        const auto after = [&](Span span, int64_t index) -> const Element* {
            if (many) return nullptr;
            if (span.end < inputs) return weights.tile(index - 1) + span.end * TILE;
            const bool cut = span.begin > 0;
            if (!cut && index < end * MATRICES) return weights.tile(index);
            if (next == NONE) return nullptr;
            return weights.tile(next * MATRICES + (cut ? index - 1 - begin * MATRICES : 0));
        };
        for (int64_t row = 0; row < rows; row += rows_at_once) {
            const int64_t count = std::min(rows_at_once, rows - row);
            const bool last = row + rows_at_once >= rows;
            for (int64_t input = 0; input < inputs; input += at_once) {
                const Span span = {input, std::min(input + at_once, inputs)};
                for (int64_t index = begin * MATRICES; index < end * MATRICES; ++index) {
                    Sums& own = sums[0][index - begin * MATRICES];
                    multiply(x, weights.tile(index), span, row, count, own, last ? after(span, index + 1) : nullptr);
                }
            }
            for (int64_t index = begin; index < end; ++index) {
                use_bundle<MATRICES>(weights, index, row, count, sums[index - begin], use);
            }
        }
    };
    // A thread takes its next turn before it begins with the one that it holds.
    int64_t held = NONE;
#pragma omp for schedule(dynamic, 1) nowait
    for (int64_t begin = 0; begin < bundles; begin += per_turn) {
        if (held != NONE) compute(held, begin);
        held = begin;
    }
    if (held != NONE) compute(held, NONE);
    team.meet();
}

}  // namespace
