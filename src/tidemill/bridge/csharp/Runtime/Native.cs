using System;
using System.Runtime.InteropServices;
using System.Threading;

namespace Tidemill
{
    /// <summary>What the bridge asks of the operating system beyond .NET: sleeping on a word of shared memory, file modes, the parent process.</summary>
    internal static class Native
    {
        private const int FutexWait = 0;
        private const int FutexWake = 1;
        private const int NotPermitted = 1; // EPERM
        private const int NoSuchCall = 38; // ENOSYS
        private const int NoSpace = 28; // ENOSPC

        [StructLayout(LayoutKind.Sequential)]
        private struct Timespec
        {
            public long Seconds;
            public long Nanoseconds;
        }

        [DllImport("libc", EntryPoint = "syscall", SetLastError = true)]
        private static extern IntPtr FutexCall(IntPtr number, IntPtr word, IntPtr operation, IntPtr value, ref Timespec timeout, IntPtr word2, IntPtr value3);

        [DllImport("libc", EntryPoint = "chmod", SetLastError = true)]
        private static extern int ChangeMode([MarshalAs(UnmanagedType.LPStr)] string path, uint mode);

        [DllImport("libc", EntryPoint = "getppid")]
        private static extern int ParentProcess();

        [DllImport("libc", EntryPoint = "open", SetLastError = true)]
        private static extern int OpenFile([MarshalAs(UnmanagedType.LPStr)] string path, int flags);

        [DllImport("libc", EntryPoint = "flock", SetLastError = true)]
        private static extern int LockFile(int file, int operation);

        [DllImport("libc", EntryPoint = "posix_fallocate")]
        private static extern int AllocateFile(int file, IntPtr first, IntPtr count);

        [DllImport("libc", EntryPoint = "close")]
        private static extern int CloseFile(int file);

        private static readonly IntPtr FutexNumber = FindFutex();

        /// <summary>Whether this system lets a process sleep on a word of shared memory until another wakes it.</summary>
        public static bool HasFutex { get; private set; } = FutexNumber != IntPtr.Zero;

        private static IntPtr FindFutex()
        {
            if (!RuntimeInformation.IsOSPlatform(OSPlatform.Linux))
            {
                return IntPtr.Zero;
            }
            switch (RuntimeInformation.ProcessArchitecture)
            {
                case Architecture.X64:
                    return new IntPtr(202);
                case Architecture.Arm64:
                    return new IntPtr(98);
                default:
                    return IntPtr.Zero;
            }
        }

        /// <summary>Sleep while `word` holds `value`, at most so long. True if another process woke this one.</summary>
        public static bool Sleep(IntPtr word, int value, long nanoseconds)
        {
            var timeout = new Timespec { Seconds = nanoseconds / 1000000000, Nanoseconds = nanoseconds % 1000000000 };
            if (FutexCall(FutexNumber, word, new IntPtr(FutexWait), new IntPtr(value), ref timeout, IntPtr.Zero, IntPtr.Zero) == IntPtr.Zero)
            {
                return true;
            }
            int error = Marshal.GetLastWin32Error();
            if (error == NotPermitted || error == NoSuchCall)
            {
                HasFutex = false; // a sandbox forbids it
            }
            return false;
        }

        /// <summary>Wake whoever sleeps on `word`.</summary>
        public static void Wake(IntPtr word)
        {
            if (HasFutex)
            {
                var unused = new Timespec();
                FutexCall(FutexNumber, word, new IntPtr(FutexWake), new IntPtr(int.MaxValue), ref unused, IntPtr.Zero, IntPtr.Zero);
            }
        }

        /// <summary>Let nobody but this user open the file.</summary>
        public static void KeepPrivate(string path)
        {
            if (!RuntimeInformation.IsOSPlatform(OSPlatform.Windows))
            {
                ChangeMode(path, 384); // 0600
            }
        }

        /// <summary>The process that started this one; -1 where that cannot be known.</summary>
        public static int Parent()
        {
            return RuntimeInformation.IsOSPlatform(OSPlatform.Windows) ? -1 : ParentProcess();
        }

        /// <summary>Whether all bytes of the file have room on the disk or in memory; true where that cannot be asked.</summary>
        public static bool Allocate(string path, int count)
        {
            int file = OpenForLock(path);
            int error = file < 0 ? 0 : AllocateFile(file, IntPtr.Zero, new IntPtr(count));
            CloseLock(file);
            return error != NoSpace;
        }

        /// <summary>A descriptor of the file for locks, which a program that this one starts does not get; -1 where there are no such locks.</summary>
        public static int OpenForLock(string path)
        {
            return RuntimeInformation.IsOSPlatform(OSPlatform.Linux) ? OpenFile(path, 2 | 0x80000) : -1; // O_RDWR, O_CLOEXEC
        }

        /// <summary>Lock the file, for this process alone or shared with others, unless another's lock forbids it.</summary>
        public static bool TryLock(int file, bool alone)
        {
            return LockFile(file, (alone ? 2 : 1) | 4) == 0; // LOCK_EX or LOCK_SH, LOCK_NB
        }

        public static void Unlock(int file)
        {
            LockFile(file, 8); // LOCK_UN
        }

        public static void CloseLock(int file)
        {
            if (file >= 0)
            {
                CloseFile(file);
            }
        }
    }
}
