"""Operations in C++ for the CPU at hand, compiled at first use."""
