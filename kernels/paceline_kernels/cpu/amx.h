// The matrix unit: tiles of 16 rows of 64 bytes, and products of two of them.
#pragma once

#include <cstdint>
#include <cstring>

#if !defined(EMULATED_TILES)
#define EMULATED_TILES 0
#endif

// Rows of a thread's eight tiles, and their bytes.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

#if EMULATED_TILES
// The instructions below in plain C++, slowly: what uses tiles is tested on machines that have none. Sums are those of
// the hardware to the bit, but for what is subnormal, which is zero there.
#define TILES
inline bool has_tiles() { return true; }

struct EmulatedTiles {
    TileShapes shapes;
    alignas(64) char bytes[8][16][64];
};
inline thread_local EmulatedTiles emulated;

class Tiles {
public:
    explicit Tiles(const TileShapes& shapes = {}) {
        emulated.shapes = shapes;
        std::memset(emulated.bytes, 0xff, sizeof emulated.bytes);  // nobody relies on what they held
    }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
};

template <int TILE>
inline void clear_tile() {
    std::memset(emulated.bytes[TILE], 0, sizeof emulated.bytes[TILE]);
}

template <int TILE>
inline void load_tile(const void* rows, int64_t stride) {
    for (int row = 0; row < emulated.shapes.rows[TILE]; ++row) {
        std::memcpy(emulated.bytes[TILE][row], (const char*)rows + row * stride, emulated.shapes.row_bytes[TILE]);
    }
}

template <int TILE>
inline void store_tile(void* rows, int64_t stride) {
    for (int row = 0; row < emulated.shapes.rows[TILE]; ++row) {
        std::memcpy((char*)rows + row * stride, emulated.bytes[TILE][row], emulated.shapes.row_bytes[TILE]);
    }
}

// Adds to every element of SUM: first the products of each 4 bytes of a row of LEFT with those of RIGHT that meet them,
// one after the other, by add(left, right, part) to a part that begins as zeros; then that.
template <int SUM, int LEFT, int RIGHT, class Sum, class Part, class Add>
inline void multiply_emulated(const Add& add) {
    for (int row = 0; row < emulated.shapes.rows[SUM]; ++row) {
        Sum sums[16];
        Part parts[16] = {};
        for (int k = 0; k < emulated.shapes.row_bytes[LEFT] / 4; ++k) {
            for (int column = 0; column < 16; ++column) {
                add(emulated.bytes[LEFT][row] + 4 * k, emulated.bytes[RIGHT][k] + 4 * column, parts[column]);
            }
        }
        std::memcpy(sums, emulated.bytes[SUM][row], sizeof sums);
        for (int column = 0; column < 16; ++column) sums[column] += parts[column].total();
        std::memcpy(emulated.bytes[SUM][row], sums, sizeof sums);
    }
}

struct HalvesPart {
    float first, second;  // of pairs
    float total() const { return first + second; }
};
struct BytesPart {
    int32_t sum;
    int32_t total() const { return sum; }
};

template <int SUM, int LEFT, int RIGHT>
inline void multiply_bfloat16_tiles() {
    multiply_emulated<SUM, LEFT, RIGHT, float, HalvesPart>([](const char* left, const char* right, HalvesPart& part) {
        uint32_t a, b;
        std::memcpy(&a, left, sizeof a);
        std::memcpy(&b, right, sizeof b);
        const uint32_t factors[] = {a << 16, b << 16, a & 0xffff0000u, b & 0xffff0000u};
        float floats[4];
        std::memcpy(floats, factors, sizeof floats);
        part.first += floats[0] * floats[1];
        part.second += floats[2] * floats[3];
    });
}

template <int SUM, int LEFT, int RIGHT>
inline void multiply_int8_tiles() {
    multiply_emulated<SUM, LEFT, RIGHT, int32_t, BytesPart>([](const char* left, const char* right, BytesPart& part) {
        for (int i = 0; i < 4; ++i) part.sum += (int8_t)left[i] * (uint8_t)right[i];
    });
}
#elif defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__) && defined(__linux__)
#define TILES
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

// Whether the kernel lets this process use it. The answer is the same for every thread and every call.
inline bool has_tiles() {
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    static const bool permitted = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return permitted;
}

// While it lives, this thread's tiles have these shapes; nothing where there are none.
class Tiles {
public:
    explicit Tiles(const TileShapes& shapes = {}) {
        if (!has_tiles()) return;
        asm volatile("ldtilecfg %0" ::"m"(shapes));  // all of it, which the intrinsic does not say
    }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
    ~Tiles() {
        if (has_tiles()) _tile_release();
    }
};

// The instructions, for tiles that are counted at compile time. Sums are [16][16] of float or int32; a left factor holds
// 16 rows of 32 bfloat16 or 64 int8, a right one 16 columns of as many, in pairs or fours: [16][16][pair].

template <int TILE>
inline void clear_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(TILE));
}

// The compiler does not know what it reads: between it and a store to there must stand a call or a barrier.
template <int TILE>
inline void load_tile(const void* rows, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(rows), "r"(stride), "i"(TILE));
}

template <int TILE>
inline void store_tile(void* rows, int64_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(rows), "r"(stride), "i"(TILE) : "memory");
}

template <int SUM, int LEFT, int RIGHT>
inline void multiply_bfloat16_tiles() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(LEFT), "i"(RIGHT));
}

// Signed times unsigned.
template <int SUM, int LEFT, int RIGHT>
inline void multiply_int8_tiles() {
    asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(SUM), "i"(LEFT), "i"(RIGHT));
}
#else
inline bool has_tiles() { return false; }

class Tiles {
public:
    explicit Tiles(const TileShapes& = {}) {}
};
#endif
