// Products of rows and weights in bf16 by the matrix unit of CPUs that have one (Intel's AMX). Each sum is over all
// entries in order, in fp32: its bits depend on its row and its output alone.

#pragma once

#include "call.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>

#define TILE_ROWS 16
#define TILE_ENTRIES 32  // of a row of x, and of each of 16 outputs

// Whether the system lets this process use tiles.
static int has_tiles(void) {
  static atomic_int known = -1;
  if (atomic_load(&known) < 0) {
    enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 };  // arch_prctl(2)
    atomic_store(&known, syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0);
  }
  return atomic_load(&known);
}

static inline void use_tiles(void) {  // all eight, with 16 rows of 64 bytes
  struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } config = {1};
  for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = TILE_ROWS;
  _tile_loadconfig(&config);
}

static inline void leave_tiles(void) { _tile_release(); }

// sum[32, 32] = x[32, D] w[D / 2, 32, 2], of which the first 16 rows alone if there are no more.
static inline void multiply_tiles(const uint16_t *x, const char *w, int64_t D, int64_t rows, float *sum) {
  const int64_t size = 4 * TILE_ROWS * 2;  // bytes of a row of w, and of sum
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t d = 0; d < D; d += TILE_ENTRIES) {
    const char *own = w + d / 2 * size;
    _tile_loadd(4, x + d, 2 * D);
    _tile_loadd(6, own, size);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, own + 64, size);
    _tile_dpbf16ps(1, 4, 7);
    if (rows > TILE_ROWS) {
      _tile_loadd(5, x + TILE_ROWS * D + d, 2 * D);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, sum, size);
  _tile_stored(1, sum + TILE_ROWS, size);
  _tile_stored(2, sum + TILE_ROWS * 2 * TILE_ROWS, size);
  _tile_stored(3, sum + TILE_ROWS * 2 * TILE_ROWS + TILE_ROWS, size);
}

#else
#define TILE_ROWS 16
#define TILE_ENTRIES 32
static inline int has_tiles(void) { return 0; }
static inline void use_tiles(void) {}
static inline void leave_tiles(void) {}
static inline void multiply_tiles(const uint16_t *x, const char *w, int64_t D, int64_t rows, float *sum) {}
#endif
