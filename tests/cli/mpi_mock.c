// An MPI library for tests, of the ABI that is defined: MPICH, STANDARD or OPEN_MPI. Its ranks are
// processes that share the file MOCK_FILE. A call that MOCK_FAILS names fails; MOCK_COUNTS is the
// number of ranks that it says the world has; MOCK_LEVEL is the level of threads.
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MOST = 16, BYTES = 8192, COMMS = 8, FAILURE = 15 };

struct area {
    _Atomic int arrived;
    char blocks[MOST][BYTES];
};

struct comm {
    int rank, size, turn, is_between, members[MOST];
    struct area *area;
};

static int is_up, is_down, known;
static pthread_t starter;

#ifdef OPEN_MPI
typedef struct comm *handle;
typedef void *type;
struct comm ompi_mpi_comm_world, ompi_mpi_comm_null;
char ompi_mpi_byte[64];
static struct comm *const world = &ompi_mpi_comm_world;
static struct comm others[COMMS];
#define NONE (&ompi_mpi_comm_null)
#define BYTE ((type)ompi_mpi_byte)
static struct comm *of(handle comm) { return comm; }
static handle named(int at) { return &others[at]; }
#else
static struct comm first, others[COMMS];
static struct comm *const world = &first;
#ifdef STANDARD
typedef void *handle;
typedef void *type;
#define NONE ((handle)0x100)
#define BYTE ((type)0x247)
// Open MPI has them below this ABI, too.
char ompi_mpi_comm_world[512], ompi_mpi_comm_null[512], ompi_mpi_byte[512];
static struct comm *of(handle comm) { return comm == (handle)0x101 ? world : comm; }
static handle named(int at) { return &others[at]; }
int MPI_Abi_get_version(int *major, int *minor)
{
    *major = 1, *minor = 0;
    return 0;
}
#else
typedef int handle;
typedef int type;
#define NONE 0x04000000
#define BYTE 0x4c00010d
static struct comm *of(handle comm) { return comm == 0x44000000 ? world : &others[comm & 0xff]; }
static handle named(int at) { return (int)(0x84000000u + at); }
int MPI_Abi_get_version(int *major, int *minor)
{
    *major = *minor = -1;
    return 0;
}
#endif
#endif

static int number(const char *name, int otherwise)
{
    return getenv(name) ? atoi(getenv(name)) : otherwise;
}

static int outcome(const char *call)
{
    if (!is_up || is_down)
        abort();
    const char *failing = getenv("MOCK_FAILS");
    return failing && !strcmp(failing, call) ? FAILURE : 0;
}

static void meet(struct comm *comm)
{
    int all = ++comm->turn * comm->size;
    atomic_fetch_add(&comm->area->arrived, 1);
    while (atomic_load(&comm->area->arrived) < all)
        sched_yield();
}

int MPI_Init(int *count, char ***words)
{
    int file = open(getenv("MOCK_FILE"), O_RDWR);
    struct area *areas =
        mmap(0, COMMS * sizeof *areas, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (file < 0 || areas == MAP_FAILED)
        abort();
    close(file);
    *world = (struct comm){
        .rank = number("MOCK_RANK", 0), .size = number("MOCK_SIZE", 1), .area = areas};
    for (int i = 0; i < world->size; i++)
        world->members[i] = i;
    starter = pthread_self();
    return is_up = 1, 0;
}

int MPI_Initialized(int *is) { return *is = is_up, 0; }
int MPI_Finalized(int *is) { return *is = is_down, 0; }
int MPI_Finalize(void) { return is_down = 1, 0; }
int MPI_Comm_rank(handle comm, int *rank)
{
    return *rank = of(comm)->rank, outcome("MPI_Comm_rank");
}
int MPI_Query_thread(int *level)
{
    return *level = number("MOCK_LEVEL", 0), outcome("MPI_Query_thread");
}
int MPI_Is_thread_main(int *is)
{
    return *is = pthread_equal(starter, pthread_self()), outcome("MPI_Is_thread_main");
}
int MPI_Comm_size(handle name, int *size)
{
    struct comm *comm = of(name);
    *size = comm == world ? number("MOCK_COUNTS", comm->size) : comm->size;
    return outcome("MPI_Comm_size");
}
int MPI_Comm_test_inter(handle comm, int *is)
{
    return *is = getenv("MOCK_BETWEEN") != 0, outcome("MPI_Comm_test_inter");
}

int MPI_Allgather(const void *from, int count, type sent, void *to, int room, type got, handle name)
{
    struct comm *comm = of(name);
    if (sent != BYTE || got != BYTE || count != room || count > BYTES)
        return FAILURE;
    if (outcome("MPI_Allgather"))
        return FAILURE;
    memcpy(comm->area->blocks[comm->members[comm->rank]], from, count);
    meet(comm);
    for (int i = 0; i < comm->size; i++)
        memcpy((char *)to + i * count, comm->area->blocks[comm->members[i]], count);
    return meet(comm), 0;
}

int MPI_Bcast(void *bytes, int count, type sent, int root, handle name)
{
    struct comm *comm = of(name);
    if (sent != BYTE || count > BYTES || outcome("MPI_Bcast"))
        return FAILURE;
    char *block = comm->area->blocks[comm->members[root]];
    if (comm->rank == root)
        memcpy(block, bytes, count);
    meet(comm);
    memcpy(bytes, block, count);
    return meet(comm), 0;
}

// Ranks keep their order: keys do not count.
int MPI_Comm_split(handle name, int colour, int key, handle *made)
{
    struct comm *comm = of(name), *part = &others[++known];
    int colours[MOST];
    MPI_Allgather(&colour, sizeof colour, BYTE, colours, sizeof colour, BYTE, name);
    *part = (struct comm){.area = world->area + 1 + colour};
    for (int i = 0; i < comm->size; i++) {
        if (i == comm->rank)
            part->rank = part->size;
        if (colours[i] == colour)
            part->members[part->size++] = comm->members[i];
    }
    return *made = named(known), 0;
}

int MPI_Error_string(int code, char *text, int *length)
{
    return *length = sprintf(text, "the mock was told to fail"), 0;
}
