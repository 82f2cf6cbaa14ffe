// Products with a matrix of any kind: of the activations as they are, or of their 8-bit roundings.
#pragma once

#include "linear.h"
#include "model.h"

namespace {

// To the nearest integer, of magnitude below 2^22: adding 1.5 * 2^23 leaves it in the low bits.
inline Ints rounded(Floats x) { return (Ints)(x + 0x1.8p23f) - 0x4b400000; }

// Rows of x in 8 bits: of several the team shares the groups, since rows may be few; a single one each thread rounds itself.
template <class T>
void quantize(Team& team, const Tiled<T>& x, int64_t rows, const Packed8::Input& to) {
    team.share_rows(rows, rows * to.groups(), [&](int64_t item) {
        const int64_t row = item % rows, group = item / rows, begin = group * GROUP;
        Floats part[GROUP / LANES] = {};
        Floats largest = {}, poison = {};
        for (int64_t i = 0; i < GROUP && begin + i < x.size; i += LANES) {
            const Floats some = load(x.at(row, begin + i)), magnitude = (Floats)((Words)some & 0x7fffffffu);
            largest = larger(magnitude, largest);
            poison += some * 0.0f;
            part[i / LANES] = some;
        }
        // What is not finite has no place among integers: its scale says so.
        const float scale = any(poison != 0.0f) ? NAN : maximum(largest) / 127;
        const Floats inverse = all(scale > 0 ? 1 / scale : 0);
        Ints sum = {};
        for (int64_t i = 0; i < GROUP; i += LANES) {
            const Ints nearest = rounded(part[i / LANES] * inverse);
            store(to.values.at(row, begin + i), nearest);
            sum += nearest;
        }
        to.scales[to.index(row, group)] = scale;
        to.corrections[to.index(row, group)] = -OFFSET * total(sum);
    });
}

// Room for activations of 8 bits.
class Quantized {
public:
    void reserve(int64_t rows, int64_t inputs, int64_t threads) {
        const int64_t padded = Packed8::padded(inputs), groups = round_up(rows, LANES) * padded / GROUP;
        rows_ = round_up(rows, LANES);
        height_ = tile_height<uint8_t>(rows);
        values_.reserve(rows, Tiled<ByteActivation>::elements(rows, padded, height_), threads);
        scales_.reserve(rows, groups, threads);
        corrections_.reserve(rows, groups, threads);
    }

    Packed8::Input of(int64_t inputs) const {
        return {{values_.own(), Packed8::padded(inputs), height_}, rows_, scales_.own(), corrections_.own()};
    }

private:
    Copies<ByteActivation> values_;
    Copies<float> scales_;
    Copies<int32_t> corrections_;
    int64_t rows_ = LANES, height_ = LANES;
};

inline Packed8 packed8(const PacelineMatrix& matrix) {
    return {(const uint8_t*)matrix.data, matrix.outputs, matrix.inputs, matrix.streamed != 0, matrix.scales};
}

template <class T>
Packed<T> packed(const PacelineMatrix& matrix) {
    return {(const T*)matrix.data, matrix.outputs, matrix.inputs, matrix.streamed != 0};
}

// `linear` by the kind of weights that the matrix holds.
template <int MATRICES, class T, class Use>
void multiply_by(Team& team, const PacelineMatrix& matrix, const Tiled<Activation<T>>& x, int64_t rows,
                 const Quantized& room, const Use& use) {
    if (!matrix.scales) return linear<MATRICES>(team, x, packed<T>(matrix), rows, use);
    const Packed8::Input quantized = room.of(matrix.inputs);
    quantize(team, x, rows, quantized);
    linear<MATRICES>(team, quantized, packed8(matrix), rows, use);
}

inline Floats with_bias(const float* sums, const PacelineMatrix& matrix, int64_t output) {
    return matrix.bias ? load(sums) + load(matrix.bias + output) : load(sums);
}

// x times a matrix, plus its bias -> out [rows, outputs], Striped or RowMajor. Shared by the team.
template <class T, class Out>
void project(Team& team, const PacelineMatrix& matrix, const Tiled<Activation<T>>& x, int64_t rows,
             const Quantized& room, const Out& out) {
    multiply_by<1, T>(team, matrix, x, rows, room, [&](int64_t output, int64_t row, const float* const* sums) {
        for (int64_t i = 0; i < TILE; i += LANES) {
            const int64_t count = matrix.outputs - output - i;
            if (count <= 0) return;
            store_some(out.at(row, output + i), with_bias(sums[0] + i, matrix, output + i), count);
        }
    });
}

}  // namespace
