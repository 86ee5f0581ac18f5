// Calls of XLA on CPUs that write keys and values into pages in place. XLA's own scatter copies all pages to change some
// of them, and widens those in bf16 first.

#include "call.h"

#define SMALL (1 << 16)  // bytes that one thread copies sooner than others would come

typedef struct {
  char *keys, *values;              // [pages, K, H, C], [pages, K, C, V]
  const char *k, *v;                // [A, J, H], [A, J, V]
  const int32_t *page, *place;      // [A]
  int64_t A, J, K, H, C, V, size;  // size: bytes of a number
} Tokens;

static inline void put(const Tokens *t, int64_t head, const int64_t size) {
  const int64_t own = head * t->J / t->K;  // heads are repeated if there are more of them in pages
  for (int64_t a = 0; a < t->A; a++) {
    if (t->page[a] == 0) continue;  // the token is not kept; page 0 stays zeros, which masked positions read
    const int64_t row = t->page[a] * t->K + head, place = t->place[a];
    const char *k = t->k + (a * t->J + own) * t->H * size;
    for (int64_t h = 0; h < t->H; h++) memcpy(t->keys + ((row * t->H + h) * t->C + place) * size, k + h * size, size);
    memcpy(t->values + (row * t->C + place) * t->V * size, t->v + (a * t->J + own) * t->V * size, t->V * size);
  }
}

static void of_head(const void *data, int64_t head) {
  const Tokens *t = data;
  if (t->size == 8) put(t, head, 8);
  if (t->size == 4) put(t, head, 4);
  if (t->size == 2) put(t, head, 2);
  if (t->size == 1) put(t, head, 1);
}

static int64_t bytes_of(const XLA_FFI_Buffer *x) {  // of a number
  if (x->dtype == XLA_FFI_DataType_F64) return 8;
  if (x->dtype == XLA_FFI_DataType_F32) return 4;
  return x->dtype == XLA_FFI_DataType_BF16 || x->dtype == XLA_FFI_DataType_F16 ? 2 : 1;
}

static int64_t bytes_of_page(const XLA_FFI_Buffer *x) {
  int64_t size = bytes_of(x);
  for (int64_t axis = 1; axis < x->rank; axis++) size *= x->dims[axis];
  return size;
}

// A result's memory, which is that of argument i unless XLA still needs it.
static char *in_place(XLA_FFI_CallFrame *frame, int i) {
  const XLA_FFI_Buffer *from = argument(frame, i), *to = result(frame, i);
  if (to->data != from->data) memcpy(to->data, from->data, from->dims[0] * bytes_of_page(from));
  return to->data;
}

// () -> pages that take memory as they are written, and hold any numbers until then, but for page 0, which is zeros.
XLA_FFI_Error *areax_untouched(XLA_FFI_CallFrame *frame) {
  if (asks_version(frame)) return NULL;
  const XLA_FFI_Buffer *x = result(frame, 0);
  memset(x->data, 0, bytes_of_page(x));
  return NULL;
}

// (keys [pages, K, H, C], values [pages, K, C, V], k[A, J, H], v[A, J, V], page s32[A], place s32[A]), numbers of 8
// to 64 bits -> keys, values with each token at its place in its page; tokens of page 0 are not kept.
XLA_FFI_Error *areax_put(XLA_FFI_CallFrame *frame) {
  if (asks_version(frame)) return NULL;
  const XLA_FFI_Buffer *keys = argument(frame, 0), *values = argument(frame, 1), *k = argument(frame, 2);
  const int64_t A = k->dims[0], K = keys->dims[1], H = keys->dims[2], size = bytes_of(keys);
  Tokens tokens = {in_place(frame, 0), in_place(frame, 1), k->data, argument(frame, 3)->data, argument(frame, 4)->data,
                   argument(frame, 5)->data, A, k->dims[1], K, H, keys->dims[3], values->dims[3], size};
  each_piece(frame, of_head, &tokens, K, A * K * H * size < SMALL ? 1 : threads_of(frame));
  return NULL;
}

// (x[pages, ...], whole [N, ...], page s32[N]) -> x with each whole page at its number.
XLA_FFI_Error *areax_put_pages(XLA_FFI_CallFrame *frame) {
  if (asks_version(frame)) return NULL;
  const XLA_FFI_Buffer *x = argument(frame, 0), *whole = argument(frame, 1);
  const int32_t *page = argument(frame, 2)->data;
  char *to = in_place(frame, 0);
  const int64_t size = bytes_of_page(x);
  for (int64_t n = 0; n < whole->dims[0]; n++) memcpy(to + page[n] * size, (const char *)whole->data + n * size, size);
  return NULL;
}

// (x[pages, ...], from s32[N], to s32[N]) -> x with page from[n] copied to page to[n]. No target is the source of
// another pair; pairs of equal numbers do nothing.
XLA_FFI_Error *areax_copy_pages(XLA_FFI_CallFrame *frame) {
  if (asks_version(frame)) return NULL;
  const XLA_FFI_Buffer *x = argument(frame, 0), *numbers = argument(frame, 1);
  const int32_t *from = numbers->data, *to = argument(frame, 2)->data;
  char *pages = in_place(frame, 0);
  const int64_t size = bytes_of_page(x);
  for (int64_t n = 0; n < numbers->dims[0]; n++)
    if (from[n] != to[n]) memcpy(pages + to[n] * size, pages + from[n] * size, size);
  return NULL;
}
