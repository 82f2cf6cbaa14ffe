// From rows of a checkpoint to tiles of packed weights.
#pragma once

#include "linear.h"

namespace {

// Rows [outputs, inputs] of a checkpoint into packed weights: row i becomes output `first + i`, or with `apart` = 2 every
// other tile is left to another matrix, which lies between.
template <class T>
struct WeightRows {
    const T* data;
    int64_t outputs, inputs, first, apart;
};

// Where a tile has input k of one of its outputs, PER_WORD of them being one of its words of 4 bytes.
template <int64_t PER_WORD>
constexpr int64_t place(int64_t output, int64_t k) {
    return (k / PER_WORD * TILE + output) * PER_WORD + k % PER_WORD;
}

// Calls put(i, count, tile, lane) for `count` rows from the i-th, those of a tile, in one thread.
template <class T, class Put>
void for_each_row(const WeightRows<T>& rows, const Put& put) {
    const int64_t first_tile = rows.first / TILE, last_tile = (rows.first + rows.outputs - 1) / TILE;
#pragma omp parallel for schedule(dynamic, 1)
    for (int64_t tile = first_tile; tile <= last_tile; ++tile) {
        const int64_t begin = std::max(rows.first, tile * TILE);
        put(begin - rows.first, std::min(rows.first + rows.outputs, (tile + 1) * TILE) - begin, tile * rows.apart,
            begin % TILE);
    }
}

// Each row as it is.
template <class T>
void pack(T* packed, const WeightRows<T>& rows) {
    const int64_t padded = Packed<T>::padded(rows.inputs);
    for_each_row(rows, [&](int64_t i, int64_t count, int64_t tile, int64_t lane) {
        T* const to = packed + tile * Packed<T>::tile_elements(rows.inputs);
        for (int64_t k = 0; k < padded; ++k) {
            for (int64_t j = 0; j < count; ++j) {
                to[place<PAIR<T>>(lane + j, k)] = k < rows.inputs ? rows.data[(i + j) * rows.inputs + k] : T{};
            }
        }
    });
}

// Each row rounded to 255 levels about zero, of which the largest is its own largest magnitude. What is not finite has no
// level: the scale of its row says so.
template <class T>
void pack8(uint8_t* packed, float* scales, const WeightRows<T>& rows) {
    const int64_t padded = Packed8::padded(rows.inputs);
    for_each_row(rows, [&](int64_t i, int64_t count, int64_t tile, int64_t lane) {
        uint8_t* const to = packed + tile * Packed8::tile_elements(rows.inputs);
        float inverse[TILE];
        for (int64_t j = 0; j < count; ++j) {
            const T* const from = rows.data + (i + j) * rows.inputs;
            float largest = 0, poison = 0;
            for (int64_t k = 0; k < rows.inputs; ++k) {
                const float x = to_float(from[k]);
                largest = std::max(largest, std::fabs(x));
                poison += x * 0;
            }
            const bool finite = poison == 0;
            scales[tile * TILE + lane + j] = finite ? largest / 127 : NAN;
            inverse[j] = finite && largest > 0 ? std::min(127 / largest, std::numeric_limits<float>::max()) : 0;
        }
        for (int64_t k = 0; k < padded; ++k) {
            for (int64_t j = 0; j < count; ++j) {
                const bool any = k < rows.inputs && inverse[j] > 0;
                const float x = any ? to_float(rows.data[(i + j) * rows.inputs + k]) * inverse[j] : 0;
                to[place<4>(lane + j, k)] = (uint8_t)((int)std::nearbyint(x) + OFFSET);
            }
        }
    });
}

// One row of packed weights, as an embedding is looked up.
template <class T>
float weight(const Packed<T>& packed, int64_t output, int64_t k) {
    return to_float(packed.tile(output / TILE)[place<PAIR<T>>(output % TILE, k)]);
}

inline float weight(const Packed8& packed, int64_t output, int64_t k) {
    const int value = packed.tile(output / TILE)[place<4>(output % TILE, k)];
    return (value - OFFSET) * packed.scales[output];
}

}  // namespace
