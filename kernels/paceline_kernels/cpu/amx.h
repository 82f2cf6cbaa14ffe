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

// While it lives, this thread's eight tiles have 16 rows of 64 bytes; nothing where there are none.
class Tiles {
public:
    Tiles() {
        if (!has_tiles()) return;
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } config;
        _tile_loadconfig(&config);
    }
    Tiles(const Tiles&) = delete;
    Tiles& operator=(const Tiles&) = delete;
    ~Tiles() {
        if (has_tiles()) _tile_release();
    }
};
#else
inline bool has_tiles() { return false; }

class Tiles {
public:
    Tiles() {}
};
#endif
