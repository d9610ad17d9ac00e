/* Access for reading only, on a driver that is mocked, and the kernel that writes in spite of it
   (`gpu/cuda/attempt.ptx`).

     READERS 1  it keeps copies out by their call, and kernels by a fault
     READERS 2  copies write all the same
     READERS 3  kernels do
     READERS 4  it has no such access
     READERS 5  the process dies of a copy
     READERS 6  kernels write nowhere
     READERS 7  kernels write all the same, and fault
     READERS 8  copies fail for want of memory */

static int faulted;

static int is_written(size_t ptr, size_t len)
{
    int at = find(ptr);
    return at < 0 || !allocations[at].mapped || allocations[at].allowed == 3;
}

int cuModuleLoadData(size_t *module, const char *text)
{
    IN_CONTEXT;
    *module = 0x70;
    return strstr(text, ".visible .entry carrack_attempt(") ? 0 : 218;
}

int cuModuleGetFunction(size_t *function, size_t module, const char *name)
{
    IN_CONTEXT;
    *function = 0x71;
    return module == 0x70 && !strcmp(name, "carrack_attempt") ? 0 : 500;
}

int cuLaunchKernel(size_t function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                   unsigned bz, unsigned shared, size_t stream, unsigned long long **arguments,
                   void **extra)
{
    IN_CONTEXT;
    if (function != 0x71 || gx * gy * gz * bx * by * bz != 1 || shared || extra)
        return INVALID_VALUE;
    size_t place = arguments[0][0];
    if (!is_device(place, 8))
        return INVALID_VALUE;
    if (READERS == 6)
        return 0;
    if (READERS == 3 || READERS == 7 || is_written(place, 8))
        *(unsigned long long *)place = arguments[1][0];
    if (READERS != 3 && !is_written(place, 8))
        faulted = 700;
    return 0;
}

int cuStreamSynchronize(size_t stream)
{
    IN_CONTEXT;
    questions[stream & 0xff] = 0;
    return faulted;
}
