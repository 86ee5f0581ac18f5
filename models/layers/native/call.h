// What the calls of XLA on CPUs in this folder share: vectors, errors, and work for several threads.

#pragma once

#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "xla/ffi/api/c_api.h"

#if defined(__AVX512F__)
#define LANES 16  // of a vector
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
#define PATIENCE 4096  // turns of waiting for helpers before others may run

typedef float f32 __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t i32 __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t u32 __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int16_t i16 __attribute__((vector_size(2 * LANES), aligned(2)));
typedef uint16_t u16 __attribute__((vector_size(2 * LANES), aligned(2)));
typedef int8_t i8 __attribute__((vector_size(LANES), aligned(1)));
typedef uint8_t u8 __attribute__((vector_size(LANES), aligned(1)));

static const int32_t order[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// e^x to about 1 ulp for x <= 0, 0 below -87: 2^n times a polynomial of the rest (Cephes' expf).
static inline f32 exponential(f32 x) {
  const i32 low = x < -87.0f;
  x = (f32)((i32)x & ~low);
  const f32 n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
  const f32 r = x - n * 0.693359375f + n * 2.12194440e-4f;
  f32 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  const i32 power = (__builtin_convertvector(n, i32) + 127) << 23;
  return (f32)((i32)(p * (f32)power) & ~low);
}

static inline float largest(f32 x) {
  float most = x[0];
  for (int i = 1; i < LANES; i++) most = x[i] > most ? x[i] : most;
  return most;
}

static inline float total(f32 x) {
  float sum = 0;
  for (int i = 0; i < LANES; i++) sum += x[i];
  return sum;
}

// Whether the call only asks for the version of this interface, which is then said.
static inline int asks_version(const XLA_FFI_CallFrame *frame) {
  if (!frame->extension_start || frame->extension_start->type != XLA_FFI_Extension_Metadata) return 0;
  XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)frame->extension_start)->metadata;  // its type has two names
  metadata->api_version.major_version = XLA_FFI_API_MAJOR;
  metadata->api_version.minor_version = XLA_FFI_API_MINOR;
  return 1;
}

static inline XLA_FFI_Buffer *argument(const XLA_FFI_CallFrame *frame, int i) { return frame->args.args[i]; }

static inline XLA_FFI_Buffer *result(const XLA_FFI_CallFrame *frame, int i) { return frame->rets.rets[i]; }

// Threads: those of XLA. The caller and helpers take pieces until none is left; a helper that comes later finds none.

typedef struct {
  void (*piece)(const void *task, int64_t i);
  const void *task;
  int64_t pieces;
  atomic_long next, done, users;
} Work;

static inline void take(Work *work) {
  int64_t i;
  while ((i = atomic_fetch_add(&work->next, 1)) < work->pieces) {
    work->piece(work->task, i);
    atomic_fetch_add(&work->done, 1);
  }
}

static inline void leave(Work *work) {
  if (atomic_fetch_sub(&work->users, 1) == 1) free(work);
}

static inline void help(void *work) {
  take(work);
  leave(work);
}

static inline int64_t threads_of(const XLA_FFI_CallFrame *frame) {
  int64_t threads = 1;
  XLA_FFI_ThreadPool_NumThreads_Args args = {
      XLA_FFI_ThreadPool_NumThreads_Args_STRUCT_SIZE, NULL, frame->ctx, &threads};
  XLA_FFI_Error *error = frame->api->XLA_FFI_ThreadPool_NumThreads(&args);
  if (!error) return threads;
  XLA_FFI_Error_Destroy_Args destroyed = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, NULL, error};
  frame->api->XLA_FFI_Error_Destroy(&destroyed);
  return 1;
}

// Computes piece(task, i) for all i < pieces, with helpers if there are `threads` > 1.
static inline void each_piece(
    const XLA_FFI_CallFrame *frame, void (*piece)(const void *, int64_t), const void *task, int64_t pieces, int64_t threads) {
  int64_t helpers = (threads < pieces ? threads : pieces) - 1;
  Work *work = helpers > 0 ? malloc(sizeof *work) : NULL;
  if (!work) {
    for (int64_t i = 0; i < pieces; i++) piece(task, i);
    return;
  }
  *work = (Work){piece, task, pieces};
  atomic_store(&work->users, helpers + 1);
  for (int64_t i = 0; i < helpers; i++) {
    XLA_FFI_ThreadPool_Schedule_Args args = {
        XLA_FFI_ThreadPool_Schedule_Args_STRUCT_SIZE, NULL, frame->ctx, help, work};
    XLA_FFI_Error *error = frame->api->XLA_FFI_ThreadPool_Schedule(&args);
    if (!error) continue;
    XLA_FFI_Error_Destroy_Args destroyed = {XLA_FFI_Error_Destroy_Args_STRUCT_SIZE, NULL, error};
    frame->api->XLA_FFI_Error_Destroy(&destroyed);
    leave(work);  // for the helper that will not come
  }
  take(work);
  for (int turns = 0; atomic_load(&work->done) < work->pieces; turns++) {
    if (turns > PATIENCE) sched_yield();  // to a helper that has no core
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  leave(work);
}
