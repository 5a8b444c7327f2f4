using System;
using System.IO;
using System.IO.MemoryMappedFiles;
using System.Runtime.InteropServices;
using System.Threading;

namespace Tidemill
{
    /// <summary>
    /// One mapped file. Every access is checked against its length, so that no number that a trainer wrote leads outside. Little-endian, unaligned.
    /// </summary>
    internal sealed class Mapping : IDisposable
    {
        private readonly MemoryMappedFile file;
        private readonly MemoryMappedViewAccessor view;

        /// <summary>What to do where a disk is full.</summary>
        internal const string Room = "Remove what is not needed there, make it larger (/dev/shm: mount -o remount,size=1G /dev/shm; of a container: --shm-size=1g), or lower maxAgents.";

        public readonly string Path;
        public readonly int Length;
        private IntPtr start;

        private Mapping(string path, FileStream stream, int length)
        {
            Path = path;
            Length = length;
            file = MemoryMappedFile.CreateFromFile(stream, null, length, MemoryMappedFileAccess.ReadWrite, HandleInheritability.None, false);
            view = file.CreateViewAccessor(0, length, MemoryMappedFileAccess.ReadWrite);
            start = view.SafeMemoryMappedViewHandle.DangerousGetHandle();
        }

        /// <summary>Map a file that the trainer made, whole.</summary>
        public static Mapping Open(string path, int leastLength)
        {
            FileStream stream;
            try
            {
                if ((File.GetAttributes(path) & FileAttributes.ReparsePoint) != 0)
                {
                    throw new BridgeException("The memory file " + path + " is a link; the bridge follows none.");
                }
                stream = new FileStream(path, FileMode.Open, FileAccess.ReadWrite, FileShare.ReadWrite | FileShare.Delete);
            }
            catch (Exception error) when (error is IOException || error is UnauthorizedAccessException)
            {
                throw new BridgeException("The memory file " + path + " cannot be opened (" + error.Message + "). Is the trainer that made it still running?", error);
            }
            long length = stream.Length;
            if (length < leastLength || length > int.MaxValue)
            {
                stream.Dispose();
                throw new CorruptMemoryException("The memory file " + path + " has " + length + " bytes; it should have at least " + leastLength + ".");
            }
            return new Mapping(path, stream, (int)length);
        }

        /// <summary>Make a file that is not there yet, for this user alone, filled with zeros, and map it.</summary>
        public static Mapping Create(string path, int length)
        {
            FileStream stream;
            try
            {
                stream = new FileStream(path, FileMode.CreateNew, FileAccess.ReadWrite, FileShare.ReadWrite | FileShare.Delete);
            }
            catch (Exception error) when (error is IOException || error is UnauthorizedAccessException)
            {
                throw new BridgeException("The larger memory file " + path + " cannot be made: " + error.Message, error);
            }
            try
            {
                Native.KeepPrivate(path);
                stream.SetLength(length);
                if (!Native.Allocate(path, length))
                {
                    throw new IOException("there is no room for it."); // here, and not a crash at the first write
                }
                return new Mapping(path, stream, length);
            }
            catch (IOException error)
            {
                stream.Dispose();
                File.Delete(path);
                throw new BridgeException("The larger memory file " + path + " of " + length + " bytes cannot be made: " + error.Message + " " + Room, error);
            }
        }

        /// <summary>The address of a byte; it holds until Dispose.</summary>
        public IntPtr At(int offset, int count)
        {
            if (start == IntPtr.Zero)
            {
                throw new ObjectDisposedException(Path);
            }
            if (offset < 0 || count < 0 || offset > Length - count)
            {
                throw new CorruptMemoryException("Bytes " + offset + " to " + ((long)offset + count) + " lie outside the memory file " + Path + " of " + Length + " bytes.");
            }
            return IntPtr.Add(start, offset);
        }

        public byte ReadByte(int offset)
        {
            byte value = Marshal.ReadByte(At(offset, 1));
            Thread.MemoryBarrier(); // what is read next was written before this byte
            return value;
        }

        public void WriteByte(int offset, byte value)
        {
            Thread.MemoryBarrier(); // what was written before is seen before this byte
            Marshal.WriteByte(At(offset, 1), value);
        }

        public int ReadInt(int offset)
        {
            return Marshal.ReadInt32(At(offset, 4));
        }

        public void WriteInt(int offset, int value)
        {
            Marshal.WriteInt32(At(offset, 4), value);
        }

        public byte[] ReadBytes(int offset, int count)
        {
            IntPtr source = At(offset, count);
            var bytes = new byte[count];
            Marshal.Copy(source, bytes, 0, count);
            return bytes;
        }

        public void Write(int offset, byte[] source, int first, int count)
        {
            Marshal.Copy(source, first, At(offset, count), count);
        }

        public unsafe void Write(int offset, void* source, int count)
        {
            Buffer.MemoryCopy(source, At(offset, count).ToPointer(), count, count);
        }

        public void Write(int offset, int[] source, int first, int count)
        {
            Marshal.Copy(source, first, At(offset, 4 * count), count);
        }

        public void Read(int offset, float[] target, int count)
        {
            Marshal.Copy(At(offset, 4 * count), target, 0, count);
        }

        public void Read(int offset, int[] target, int count)
        {
            Marshal.Copy(At(offset, 4 * count), target, 0, count);
        }

        public void Dispose()
        {
            if (start == IntPtr.Zero)
            {
                return;
            }
            start = IntPtr.Zero;
            view.Dispose();
            file.Dispose();
        }

        /// <summary>Unmap and remove the file, which may be gone already.</summary>
        public void Delete()
        {
            Dispose();
            Remove(Path);
        }

        public static void Remove(string path)
        {
            try
            {
                File.Delete(path);
            }
            catch (Exception error) when (error is IOException || error is UnauthorizedAccessException)
            {
                // The trainer removes what is left of an ended run at its next start.
            }
        }
    }
}
