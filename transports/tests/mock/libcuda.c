/* A mock of the driver's library, for tests of the loader on machines without a GPU. It is no driver: nothing here
   computes or copies anything.

     -DSTUB      as a toolkit's stub: every call says 34
     -DANCIENT   a driver of CUDA 10.2
     otherwise   one device; lacks many calls, answers with codes and types that no header has  */

#include <stddef.h>
#include <string.h>

#ifdef STUB

int cuInit(unsigned flags) { return 34; }
int cuDriverGetVersion(int *version) { return 34; }
int cuDeviceGetCount(int *count) { return 34; }

#else

enum { INVALID_VALUE = 1, NOT_INITIALIZED = 3, UNHEARD_OF = 4242 };

static int inits;
static __thread void *stack[16];
static __thread int depth;
static int retained;

/* For the test to look at. */
int mock_inits(void) { return inits; }
int mock_depth(void) { return depth; }
int mock_retained(void) { return retained; }

int cuDriverGetVersion(int *version) {
#ifdef ANCIENT
  *version = 10020;
#else
  *version = 99000;
#endif
  return 0;
}

int cuInit(unsigned flags) {
  inits++;
  return 0;
}

int cuDeviceGetCount(int *count) {
  if (!inits) return NOT_INITIALIZED;
  *count = 1;
  return 0;
}

int cuDeviceGet(int *device, int ordinal) {
  *device = ordinal;
  return 0;
}

int cuDeviceGetName(char *name, int len, int device) {
  strncpy(name, "Mock", len);
  return 0;
}

/* Only the older name of this one. */
int cuDeviceGetUuid(char *uuid, int device) {
  memset(uuid, 7, 16);
  return 0;
}

int cuDeviceGetPCIBusId(char *id, int len, int device) {
  /* As long as the place, and without an end. */
  memset(id, 'F', len);
  return 0;
}

int cuDeviceTotalMem_v2(size_t *bytes, int device) {
  *bytes = 1 << 30;
  return 0;
}

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
  *flags = 0;
  *active = retained > 0;
  return 0;
}

int cuDevicePrimaryCtxRetain(void **context, int device) {
  retained++;
  *context = (void *)0xc0;
  return 0;
}

int cuCtxGetCurrent(void **context) {
  *context = depth ? stack[depth - 1] : NULL;
  return 0;
}

int cuCtxPushCurrent_v2(void *context) {
  stack[depth++] = context;
  return 0;
}

int cuCtxPopCurrent_v2(void **context) {
  *context = stack[--depth];
  return 0;
}

int cuMemAlloc_v2(size_t *ptr, size_t len) { return UNHEARD_OF; }

int cuStreamCreate(size_t *stream, unsigned flags) {
  *stream = 0x57;
  return 0;
}

int cuStreamDestroy_v2(size_t stream) { return UNHEARD_OF; }

/* Knows eight attributes of a pointer, and no more. 0x10000 and 1 MiB from there is device memory; 0x900000 is memory
   of a type that is not known; 0xa00000 belongs to a device that is not visible; all else is the host's. */
int cuPointerGetAttributes(unsigned count, const int *attributes, void **data, size_t ptr) {
  if (!inits) return NOT_INITIALIZED;
  if (count > 8) return INVALID_VALUE;
  int device = ptr >= 0x10000 && ptr < 0x110000;
  for (unsigned at = 0; at < count; at++) {
    switch (attributes[at]) {
      case 2: *(unsigned *)data[at] = device || ptr == 0xa00000 ? 2 : ptr == 0x900000 ? 77 : 0; break;
      case 9: *(int *)data[at] = ptr == 0xa00000 ? 5 : device || ptr == 0x900000 ? 0 : -2; break;
      case 7: *(unsigned long long *)data[at] = device ? 99 : 0; break;
      case 11: *(size_t *)data[at] = device ? 0x10000 : 0; break;
      case 12: *(size_t *)data[at] = device ? 0x100000 : 0; break;
      default: break;
    }
  }
  return 0;
}

#endif
