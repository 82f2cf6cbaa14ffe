// What products of rows and packed columns are made of: sums in registers, and what is added to them.
#pragma once

#include "layout.h"

namespace {

// Registers for sums and for the factor that waits for all of the other one.
#if defined(__AVX512F__)
constexpr int ROOM = 26;
#else
constexpr int ROOM = 14;
#endif

// Whether they hold the sums of so many rows with so many registers of columns.
constexpr bool fit(int rows, int columns) { return rows * columns + std::min(rows, columns) <= ROOM; }

// The factors of a product: a line of weights W, a register of 4 bytes for each output, and the inputs X that meet them;
// in PARTS that are added one after the other.
template <class W, class X>
struct Factors {
    static constexpr int PARTS = 1;

    static Register weights(Register line, int) { return line; }
    static Register input(const X* from, int) { return broadcast(*from); }
    static Register add(Register weights, Register input, Register sum) { return accumulate(weights, input, sum); }
};

template <>
struct Factors<bfloat16, bfloat16> {
    static constexpr int PARTS = 1;

    static Bits weights(Register line, int) { return (Bits)line; }
    static Bits input(const bfloat16* from, int) { return broadcast_word(from); }
    static Register add(Bits weights, Bits input, Register sum) { return multiply_add_pairs(weights, input, sum); }
};

template <>
struct Factors<bfloat16, WideHalf> : Factors<float, float> {
    static constexpr int PARTS = 2;

    static Register weights(Register line, int part) {
        const Bits pairs = kept((Bits)line);
        return (Register)(part == 0 ? pairs << 16 : pairs & 0xffff0000u);
    }
    static Register input(const WideHalf* from, int part) { return broadcast(from[part].value); }
};

template <>
struct Factors<uint8_t, int8_t> {
    static constexpr int PARTS = 1;

    static Bits weights(Register line, int) { return (Bits)line; }
    static Bits input(const int8_t* from, int) { return broadcast_word(from); }
    static Integers add(Bits weights, Bits input, Integers sum) { return multiply_add_bytes(weights, input, sum); }
};

template <>
struct Factors<uint8_t, WideByte> {
    static constexpr int PARTS = 2;

    static Bits weights(Register line, int part) {
        const Bits bytes = kept((Bits)line);
        return part == 0 ? bytes & 0x00ff00ffu : upper_bytes(bytes);
    }
    static Bits input(const WideByte* from, int part) { return broadcast_word(from + 2 * part); }
    static Integers add(Bits weights, Bits input, Integers sum) {
        return kept(multiply_add_shorts(weights, input, sum));
    }
};

// Adds the product of 4 bytes of each row, `k` elements from where it begins, and a register of weights for each column,
// `weights(column)`. The factor of which there is less waits in registers. With ONCE no cache needs to keep the weights.
template <class W, bool ONCE = false, int ROWS, int WIDTH, class X, class Sum, class At>
inline void step(Sum (&sums)[ROWS][WIDTH], const At& weights, const X* const (&rows)[ROWS], int64_t k) {
    using Both = Factors<W, X>;
    using Factor = decltype(Both::input(*rows, 0));
    const auto line = [&](int column) { return ONCE ? load_once(weights(column)) : load_register(weights(column)); };
#pragma GCC unroll 2
    for (int part = 0; part < Both::PARTS; ++part) {
        if constexpr (ROWS < WIDTH) {
            Factor inputs[ROWS];
#pragma GCC unroll 12
            for (int i = 0; i < ROWS; ++i) inputs[i] = kept(Both::input(rows[i] + k, part));
#pragma GCC unroll 8
            for (int column = 0; column < WIDTH; ++column) {
                const Factor some = kept(Both::weights(line(column), part));
#pragma GCC unroll 12
                for (int i = 0; i < ROWS; ++i) sums[i][column] = Both::add(some, inputs[i], sums[i][column]);
            }
        } else {
            Factor some[WIDTH];
#pragma GCC unroll 8
            for (int column = 0; column < WIDTH; ++column) {
                some[column] = kept_for_all(Both::weights(line(column), part));
            }
#pragma GCC unroll 12
            for (int i = 0; i < ROWS; ++i) {
                const Factor input = kept(Both::input(rows[i] + k, part));
#pragma GCC unroll 8
                for (int column = 0; column < WIDTH; ++column) {
                    sums[i][column] = Both::add(some[column], input, sums[i][column]);
                }
            }
        }
    }
}

}  // namespace
