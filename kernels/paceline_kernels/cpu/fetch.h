// In which order lines of memory are asked for that are read soon.
#pragma once

#include "vec.h"

namespace {

// CPUs of Intel read ahead by themselves, but never beyond a page: who walks along one stretch of memory waits at every
// page for the first lines of it. There the lines of four pages are asked for in turn, so that it reads ahead in four places
// at once, and the pages' begins are long over when they are reached.
constexpr bool IN_TURN = INTEL;
constexpr int64_t PAGE = 1 << 12, PAGES = 4, STRETCH = PAGES * PAGE;

// Where the line lies that is asked for in the turn of this one. Of each aligned stretch every line has its turn.
inline const char* in_turn(const char* line) {
    if constexpr (!IN_TURN) return line;
    const int64_t place = (uintptr_t)line % STRETCH;
    return line - place + place / 64 % PAGES * PAGE + place / (64 * PAGES) * 64;
}

// From there to where the line of the next turn lies, if this one's number is even; and on so, if it is a multiple of four.
constexpr int64_t NEXT_LINE = IN_TURN ? PAGE : 64;

}  // namespace
