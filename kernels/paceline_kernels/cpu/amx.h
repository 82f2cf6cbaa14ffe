// The matrix unit: tiles of 16 rows of 64 bytes, and products of two of them.
#pragma once

#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512BF16__) && defined(__linux__)
#define AMX
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

// Whether the kernel lets this process use it. The answer is the same for every thread and every call.
inline bool has_tiles() {
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    static const bool permitted = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
    return permitted;
}

// Rows of this thread's eight tiles, and their bytes.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

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

struct TileShapes {};

class Tiles {
public:
    explicit Tiles(const TileShapes& = {}) {}
};
#endif
