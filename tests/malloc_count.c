/* Preloaded by tests/test_allocations.py: counts the calling thread's allocations. */
#define _GNU_SOURCE
#include <stddef.h>
#include <stdint.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);

static __thread int64_t count __attribute__((tls_model("initial-exec")));

int64_t dagserve_malloc_count(void) { return count; }

void *malloc(size_t size) {
  ++count;
  return __libc_malloc(size);
}

void *calloc(size_t items, size_t size) {
  ++count;
  return __libc_calloc(items, size);
}

void *realloc(void *old, size_t size) {
  ++count;
  return __libc_realloc(old, size);
}

void *memalign(size_t alignment, size_t size) {
  ++count;
  return __libc_memalign(alignment, size);
}

void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

int posix_memalign(void **out, size_t alignment, size_t size) {
  *out = memalign(alignment, size);
  return *out == NULL ? 12 : 0;
}
