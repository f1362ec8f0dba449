// A CUDA of host memory: enough for tritonserver and its Python stubs to hand on "GPU" tensors without a GPU. LD_PRELOADed
// into both, and found as libcuda.so. STUB_WINDOW_US: how long the server takes, when it shares its pool of GPU memory with
// a stub, from freeing its message to the last byte that it writes to it (tessera/tritonserver/gpu_pool.py).
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

typedef int E;
static struct { char* at; size_t size; char name[56]; } table[64];
static int used;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static __thread int just_opened;

static int find(const void* p) {
  for (int i = 0; i < used; i++)
    if (table[i].at && (char*)p >= table[i].at && (char*)p < table[i].at + table[i].size) return i;
  return -1;
}
static void add(void* at, size_t size, const char* name) {
  pthread_mutex_lock(&lock);
  int i = used++ % 64;
  table[i].at = at; table[i].size = size; strcpy(table[i].name, name);
  pthread_mutex_unlock(&lock);
}
E cudaGetDeviceCount(int* n) { *n = 1; return 0; }
static void pause_if_asked(void);
E cudaGetDevice(int* d) { *d = 0; pause_if_asked(); return 0; }
E cudaSetDevice(int d) { return 0; }
E cudaGetDeviceProperties_v2(char* p, int d) {
  memset(p, 0, 1032);
  strcpy(p, "fake");
  *(size_t*)(p + 288) = 8ul << 30;
  *(int*)(p + 360) = 9;
  return 0;
}
E cudaMalloc(void** p, size_t size) {
  char name[56];
  int file = memfd_create("fake_cuda", 0);  // others open it by this process's descriptor; it ends with the last of them
  if (file < 0 || ftruncate(file, size)) return 2;
  snprintf(name, sizeof name, "/proc/%d/fd/%d", getpid(), file);
  *p = mmap(0, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  add(*p, size, name);
  return 0;
}
E cudaMallocManaged(void** p, size_t size, unsigned f) { return cudaMalloc(p, size); }
E cudaFree(void* p) { int i = find(p); if (i >= 0) { munmap(table[i].at, table[i].size); table[i].at = 0; } return 0; }
E cudaHostAlloc(void** p, size_t size, unsigned f) { *p = malloc(size); return 0; }
E cudaFreeHost(void* p) { free(p); return 0; }
E cudaMemGetInfo(size_t* f, size_t* t) { *f = *t = 8ul << 30; return 0; }
E cudaMemcpy(void* d, const void* s, size_t n, int k) { memcpy(d, s, n); return 0; }
E cudaMemcpyAsync(void* d, const void* s, size_t n, int k, void* q) { memcpy(d, s, n); return 0; }
E cudaMemcpyPeer(void* d, int a, const void* s, int b, size_t n) { memcpy(d, s, n); return 0; }
E cudaMemcpyPeerAsync(void* d, int a, const void* s, int b, size_t n, void* q) { memcpy(d, s, n); return 0; }
E cudaMemset(void* d, int v, size_t n) { memset(d, v, n); return 0; }
E cudaMemPrefetchAsync(void* d, size_t n, int x, void* q) { return 0; }
E cudaStreamCreate(void** s) { *s = (void*)64; return 0; }
E cudaStreamCreateWithPriority(void** s, unsigned f, int p) { *s = (void*)64; return 0; }
E cudaStreamDestroy(void* s) { return 0; }
E cudaStreamSynchronize(void* s) { return 0; }
E cudaStreamGetFlags(void* s, unsigned* f) { *f = 0; return 0; }
E cudaEventRecord(void* e, void* s) { return 0; }
E cudaEventSynchronize(void* e) { return 0; }
E cudaEventCreate(void** e) { *e = (void*)64; return 0; }
E cudaGetLastError(void) { return 0; }
E cudaDeviceCanAccessPeer(int* c, int a, int b) { *c = 0; return 0; }
E cudaDeviceEnablePeerAccess(int a, unsigned f) { return 0; }
E cudaDeviceGetPCIBusId(char* s, int n, int d) { strncpy(s, "0000:00:00.0", n); return 0; }
E cudaDeviceGetStreamPriorityRange(int* a, int* b) { *a = *b = 0; return 0; }
E cudaLaunchHostFunc(void* s, void (*f)(void*), void* x) { f(x); return 0; }
const char* cudaGetErrorString(E e) { return "fake error"; }
E cudaIpcGetMemHandle(char* handle, void* p) {
  int i = find(p);
  if (i < 0) return 1;
  memset(handle, 0, 64);
  just_opened = 1;  // ShareCUDAMemoryPool asks once; the next thing of CUDA this thread does is to free the block of the pool
  strcpy(handle, table[i].name);
  return 0;
}
E cudaIpcOpenMemHandle(void** p, struct { char c[64]; } handle, unsigned f) {
  int file = open(handle.c, O_RDWR);
  struct stat s;
  if (file < 0 || fstat(file, &s)) return 1;
  *p = mmap(0, s.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  add(*p, s.st_size, handle.c);
  return 0;
}
E cudaIpcCloseMemHandle(void* p) { int i = find(p); if (i >= 0) { munmap(table[i].at, table[i].size); table[i].at = 0; } return 0; }
// the driver
E cuPointerGetAttribute(void** out, int attribute, char* p) {
  int i = find(p);
  *out = i < 0 ? p : table[i].at;
  return 0;
}
E cuGetErrorString(E e, const char** s) { *s = "fake driver error"; return 0; }
E cuInit(unsigned f) { return 0; }
E cuDevicePrimaryCtxGetState(int d, unsigned* f, int* active) { *f = 0; *active = 1; return 0; }

static void pause_if_asked(void) {
  static int us = -1;
  if (us < 0) us = getenv("STUB_WINDOW_US") && strstr(program_invocation_short_name, "tritonserver") ? atoi(getenv("STUB_WINDOW_US")) : 0;
  if (just_opened) {
    just_opened = 0;
    if (us) usleep(us);
  }
}
